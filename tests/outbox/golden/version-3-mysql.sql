CREATE TABLE IF NOT EXISTS trans_compensation (
	name VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	version BIGINT NOT NULL,
	epoch VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
	settled_us BIGINT NOT NULL,
	suspended_us BIGINT,
	reason MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
	changed_us BIGINT NOT NULL,
	PRIMARY KEY (name)
)ENGINE=InnoDB;
CREATE TABLE IF NOT EXISTS trans_compensation_case (
	name VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	message_id BINARY(16) NOT NULL,
	state SMALLINT NOT NULL,
	attempts INTEGER NOT NULL,
	first_us BIGINT NOT NULL,
	changed_us BIGINT NOT NULL,
	reason MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
	notes MEDIUMTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
	PRIMARY KEY (name, message_id)
)ENGINE=InnoDB;
CREATE INDEX trans_compensation_case_by_state ON trans_compensation_case (name, state, changed_us);
INSERT IGNORE INTO trans_schema (one, version) VALUES (1, 3);
UPDATE trans_schema SET version=3 WHERE trans_schema.one = 1;
