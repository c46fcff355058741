CREATE TABLE IF NOT EXISTS trans_schema (
	one SMALLINT NOT NULL,
	version INTEGER NOT NULL,
	PRIMARY KEY (one)
);
CREATE TABLE IF NOT EXISTS trans_message (
	seq INTEGER NOT NULL,
	id BLOB NOT NULL,
	lane SMALLINT NOT NULL,
	state SMALLINT NOT NULL,
	topic VARCHAR(127) NOT NULL,
	"key" TEXT,
	tag TEXT,
	properties TEXT,
	body BLOB NOT NULL,
	delay_us BIGINT NOT NULL,
	attempts INTEGER NOT NULL,
	due_us BIGINT NOT NULL,
	created_us BIGINT NOT NULL,
	sent_us BIGINT,
	done_us BIGINT,
	error TEXT,
	PRIMARY KEY (seq),
	UNIQUE (id)
);
CREATE TABLE IF NOT EXISTS trans_lane (
	lane SMALLINT NOT NULL,
	owner VARCHAR(127),
	epoch BIGINT NOT NULL,
	leased_until_us BIGINT NOT NULL,
	PRIMARY KEY (lane)
);
CREATE TABLE IF NOT EXISTS trans_relay (
	owner VARCHAR(127) NOT NULL,
	alive_until_us BIGINT NOT NULL,
	PRIMARY KEY (owner)
);
CREATE TABLE IF NOT EXISTS trans_recv_log (
	consumer_group VARCHAR(127) NOT NULL,
	message_id BLOB NOT NULL,
	seen_us BIGINT NOT NULL,
	PRIMARY KEY (consumer_group, message_id)
);
CREATE TABLE IF NOT EXISTS trans_recv_offset (
	consumer_group VARCHAR(127) NOT NULL,
	topic VARCHAR(127) NOT NULL,
	shard BIGINT NOT NULL,
	queue INTEGER NOT NULL,
	stride INTEGER NOT NULL,
	part INTEGER NOT NULL,
	next_offset BIGINT NOT NULL,
	epoch BIGINT NOT NULL,
	owner VARCHAR(127),
	PRIMARY KEY (consumer_group, topic, shard, queue, stride, part)
);
CREATE TABLE IF NOT EXISTS trans_barrier (
	transaction_id BLOB NOT NULL,
	branch VARCHAR(127) NOT NULL,
	reason SMALLINT NOT NULL,
	decided_us BIGINT NOT NULL,
	PRIMARY KEY (transaction_id, branch)
);
CREATE TABLE IF NOT EXISTS trans_prepared (
	consumer_group VARCHAR(127) NOT NULL,
	message_id BLOB NOT NULL,
	topic VARCHAR(127) NOT NULL,
	"key" TEXT,
	tag TEXT,
	properties TEXT,
	body BLOB NOT NULL,
	prepared_us BIGINT NOT NULL,
	PRIMARY KEY (consumer_group, message_id)
);
CREATE TABLE IF NOT EXISTS trans_driven (
	id BLOB NOT NULL,
	producer_group VARCHAR(127) NOT NULL,
	state SMALLINT NOT NULL,
	shard BIGINT,
	transaction_id BLOB,
	topic VARCHAR(127) NOT NULL,
	"key" TEXT,
	tag TEXT,
	properties TEXT,
	body BLOB NOT NULL,
	delay_us BIGINT NOT NULL,
	attempts INTEGER NOT NULL,
	created_us BIGINT NOT NULL,
	PRIMARY KEY (id)
);
CREATE INDEX IF NOT EXISTS trans_barrier_by_time ON trans_barrier (decided_us);
CREATE INDEX IF NOT EXISTS trans_driven_by_group ON trans_driven (producer_group, state);
CREATE INDEX IF NOT EXISTS trans_message_aside ON trans_message (state, lane, due_us) WHERE state >= 3;
CREATE INDEX IF NOT EXISTS trans_message_kept ON trans_message (state, sent_us) WHERE sent_us IS NOT NULL;
CREATE INDEX IF NOT EXISTS trans_message_pending ON trans_message (lane, seq) WHERE state = 0;
CREATE INDEX IF NOT EXISTS trans_recv_log_by_time ON trans_recv_log (seen_us);
INSERT INTO trans_lane (lane, epoch, leased_until_us) VALUES (0, 0, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0), (4, 0, 0), (5, 0, 0), (6, 0, 0), (7, 0, 0), (8, 0, 0), (9, 0, 0), (10, 0, 0), (11, 0, 0), (12, 0, 0), (13, 0, 0), (14, 0, 0), (15, 0, 0), (16, 0, 0), (17, 0, 0), (18, 0, 0), (19, 0, 0), (20, 0, 0), (21, 0, 0), (22, 0, 0), (23, 0, 0), (24, 0, 0), (25, 0, 0), (26, 0, 0), (27, 0, 0), (28, 0, 0), (29, 0, 0), (30, 0, 0), (31, 0, 0), (32, 0, 0), (33, 0, 0), (34, 0, 0), (35, 0, 0), (36, 0, 0), (37, 0, 0), (38, 0, 0), (39, 0, 0), (40, 0, 0), (41, 0, 0), (42, 0, 0), (43, 0, 0), (44, 0, 0), (45, 0, 0), (46, 0, 0), (47, 0, 0), (48, 0, 0), (49, 0, 0), (50, 0, 0), (51, 0, 0), (52, 0, 0), (53, 0, 0), (54, 0, 0), (55, 0, 0), (56, 0, 0), (57, 0, 0), (58, 0, 0), (59, 0, 0), (60, 0, 0), (61, 0, 0), (62, 0, 0), (63, 0, 0) ON CONFLICT DO NOTHING;
INSERT INTO trans_schema (one, version) VALUES (1, 1) ON CONFLICT DO NOTHING;
UPDATE trans_schema SET version=1 WHERE trans_schema.one = 1;
