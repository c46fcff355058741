ALTER TABLE trans_recv_log ADD COLUMN topic VARCHAR(127);
INSERT INTO trans_schema (one, version) VALUES (1, 2) ON CONFLICT DO NOTHING;
UPDATE trans_schema SET version=2 WHERE trans_schema.one = 1;
