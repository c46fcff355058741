CREATE TABLE IF NOT EXISTS trans_compensation (
	name VARCHAR(127) NOT NULL,
	version BIGINT NOT NULL,
	epoch VARCHAR(127),
	settled_us BIGINT NOT NULL,
	suspended_us BIGINT,
	reason TEXT,
	changed_us BIGINT NOT NULL,
	PRIMARY KEY (name)
);
CREATE TABLE IF NOT EXISTS trans_compensation_case (
	name VARCHAR(127) NOT NULL,
	message_id BLOB NOT NULL,
	state SMALLINT NOT NULL,
	attempts INTEGER NOT NULL,
	first_us BIGINT NOT NULL,
	changed_us BIGINT NOT NULL,
	reason TEXT NOT NULL,
	notes TEXT,
	PRIMARY KEY (name, message_id)
);
CREATE INDEX IF NOT EXISTS trans_compensation_case_by_state ON trans_compensation_case (name, state, changed_us);
INSERT INTO trans_schema (one, version) VALUES (1, 3) ON CONFLICT DO NOTHING;
UPDATE trans_schema SET version=3 WHERE trans_schema.one = 1;
