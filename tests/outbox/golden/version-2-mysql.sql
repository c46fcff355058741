ALTER TABLE trans_recv_log ADD COLUMN topic VARCHAR(127) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin;
INSERT IGNORE INTO trans_schema (one, version) VALUES (1, 2);
UPDATE trans_schema SET version=2 WHERE trans_schema.one = 1;
