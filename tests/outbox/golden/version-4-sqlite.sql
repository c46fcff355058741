CREATE TABLE IF NOT EXISTS trans_act (
	number BIGINT NOT NULL,
	record TEXT NOT NULL,
	PRIMARY KEY (number)
);
CREATE TABLE IF NOT EXISTS trans_act_head (
	one SMALLINT NOT NULL,
	number BIGINT NOT NULL,
	hash VARCHAR(127) NOT NULL,
	PRIMARY KEY (one)
);
INSERT INTO trans_act_head (one, number, hash) VALUES (1, 0, 'd283294be2c51870ff5c1afa267ee1cf3000391b4f357a26d1ad2b165ff4bab8') ON CONFLICT DO NOTHING;
ALTER TABLE trans_driven ADD COLUMN was SMALLINT;
ALTER TABLE trans_driven ADD COLUMN reason VARCHAR(127);
CREATE INDEX IF NOT EXISTS trans_compensation_case_listed ON trans_compensation_case (name, state, message_id);
CREATE INDEX IF NOT EXISTS trans_driven_by_state ON trans_driven (state, id, producer_group);
CREATE INDEX IF NOT EXISTS trans_message_listed ON trans_message (state, seq) WHERE state >= 3;
INSERT INTO trans_schema (one, version) VALUES (1, 4) ON CONFLICT DO NOTHING;
UPDATE trans_schema SET version=4 WHERE trans_schema.one = 1;
