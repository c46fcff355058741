CREATE TABLE IF NOT EXISTS trans_act (
	number BIGINT NOT NULL,
	record MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	PRIMARY KEY (number)
)ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS trans_act_head (
	one SMALLINT NOT NULL,
	number BIGINT NOT NULL,
	hash VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	PRIMARY KEY (one)
)ENGINE=InnoDB;
INSERT IGNORE INTO trans_act_head (one, number, hash) VALUES (1, 0, 'd283294be2c51870ff5c1afa267ee1cf3000391b4f357a26d1ad2b165ff4bab8');
ALTER TABLE trans_driven ADD COLUMN IF NOT EXISTS was SMALLINT;
ALTER TABLE trans_driven ADD COLUMN IF NOT EXISTS reason VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
CREATE INDEX IF NOT EXISTS trans_compensation_case_listed ON trans_compensation_case (name, state, message_id);
CREATE INDEX IF NOT EXISTS trans_driven_by_state ON trans_driven (state, id, producer_group);
INSERT IGNORE INTO trans_schema (one, version) VALUES (1, 4);
UPDATE trans_schema SET version=4 WHERE trans_schema.one = 1;
