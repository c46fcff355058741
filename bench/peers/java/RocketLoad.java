import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Loads a RocketMQ broker: {@code RocketLoad NAMESERVER WORK CALLERS SECONDS WARM BODY ROWS}.
 *
 * <p>Works: {@code threads} (each caller sends one transactional message after the other and commits it), {@code paced} (the same, ROWS
 * per second of all callers together), {@code seen} (one caller, and a consumer that waits), {@code prepare} (ROWS half messages without
 * a decision), {@code first} (one message, as soon as the broker takes it), {@code asked} (waits until ROWS half messages were asked
 * about, and leaves them undecided), {@code queue} (ROWS committed messages). It does its work for WARM seconds that do not count,
 * writes {@code ready} on standard output, waits for a line on standard input, and writes one JSON object at the end.
 */
public final class RocketLoad {
    private static final String TOPIC = "bench";
    private static final String GROUP = "bench-producers";
    private static long processorAtBegin;

    public static void main(String[] arguments) throws Exception {
        String server = arguments[0];
        String work = arguments[1];
        int callers = Integer.parseInt(arguments[2]);
        double seconds = Double.parseDouble(arguments[3]);
        double warm = Double.parseDouble(arguments[4]);
        byte[] body = new byte[Integer.parseInt(arguments[5])];
        int rows = Integer.parseInt(arguments[6]);
        Arrays.fill(body, (byte) 'x');
        Answers answers = new Answers(work.equals("prepare") || work.equals("asked"));
        if (work.equals("first")) begin();
        long start = System.nanoTime();
        TransactionMQProducer producer = producer(server, work.equals("first") ? "bench-first" : GROUP, answers, Math.max(callers, 4));
        if (!work.equals("asked")) firstMessage(producer, TOPIC);
        switch (work) {
            case "threads" -> {
                threads(producer, callers, warm, 0, body);
                begin();
                print(threads(producer, callers, seconds, 0, body));
            }
            case "paced" -> {
                threads(producer, callers, warm, rows, body);
                begin();
                print(threads(producer, callers, seconds, rows, body));
            }
            case "prepare", "queue" -> print(rows(producer, callers, rows, body));
            case "seen" -> print(seen(producer, server, seconds, warm, body));
            case "first" -> print(result(List.of(System.nanoTime() - start), (System.nanoTime() - start) / 1e9, 0));
            case "asked" -> print(asked(producer, answers, rows, seconds));
            default -> throw new IllegalArgumentException(work);
        }
        System.out.flush();
        Runtime.getRuntime().halt(0); // its clients' own ways to an end take seconds
    }

    /** Decides at once, or leaves undecided; counts whom it was asked about. */
    private static final class Answers implements TransactionListener {
        final java.util.Set<String> asked = ConcurrentHashMap.newKeySet();
        private final boolean undecided;

        Answers(boolean undecided) {
            this.undecided = undecided;
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return undecided ? LocalTransactionState.UNKNOW : LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            asked.add(message.getTransactionId());
            return undecided ? LocalTransactionState.UNKNOW : LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    private static TransactionMQProducer producer(String server, String group, Answers answers, int threads) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(group);
        producer.setNamesrvAddr(server);
        producer.setTransactionListener(answers);
        producer.setSendMsgTimeout(20_000);
        producer.setExecutorService(
                new ThreadPoolExecutor(threads, threads, 10, TimeUnit.SECONDS, new LinkedBlockingQueue<>(200_000)));
        producer.start();
        return producer;
    }

    /** A topic is made by its first message, and its route takes a moment. */
    private static void firstMessage(TransactionMQProducer producer, String topic) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                if (send(producer, new Message(topic, new byte[] {'0'}))) return;
            } catch (Exception problem) {
                if (attempt > 2000) throw problem;
            }
            Thread.sleep(10);
        }
    }

    private static boolean send(TransactionMQProducer producer, Message message) throws Exception {
        TransactionSendResult result = producer.sendMessageInTransaction(message, null);
        return result.getSendStatus() == SendStatus.SEND_OK;
    }

    /** {@code rate}: transactions per second of all callers together; 0: as many as they come to. */
    private static String threads(TransactionMQProducer producer, int callers, double seconds, int rate, byte[] body) throws Exception {
        AtomicLong failed = new AtomicLong();
        List<Long> all = new ArrayList<>();
        CountDownLatch finished = new CountDownLatch(callers);
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        long pause = rate == 0 ? 0 : (long) (1e9 * callers / rate);
        for (int caller = 0; caller < callers; caller++) {
            long first = start + pause * caller / callers;
            new Thread(() -> {
                List<Long> times = new ArrayList<>();
                for (long turn = first; System.nanoTime() < until; turn += pause) {
                    if (pause > 0) waitUntil(turn);
                    long begin = System.nanoTime();
                    try {
                        if (!send(producer, new Message(TOPIC, body))) failed.incrementAndGet();
                        else times.add(System.nanoTime() - begin);
                    } catch (Exception problem) {
                        failed.incrementAndGet();
                    }
                }
                synchronized (all) {
                    all.addAll(times);
                }
                finished.countDown();
            }).start();
        }
        finished.await();
        return result(all, (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static void waitUntil(long turn) {
        for (long left = turn - System.nanoTime(); left > 0; left = turn - System.nanoTime()) LockSupport.parkNanos(left);
    }

    private static String rows(TransactionMQProducer producer, int callers, int rows, byte[] body) throws Exception {
        AtomicLong left = new AtomicLong(rows);
        AtomicLong failed = new AtomicLong();
        CountDownLatch finished = new CountDownLatch(callers);
        begin();
        long start = System.nanoTime();
        for (int caller = 0; caller < callers; caller++) {
            new Thread(() -> {
                while (left.decrementAndGet() >= 0) {
                    try {
                        if (!send(producer, new Message(TOPIC, body))) throw new IllegalStateException("not stored and synced");
                    } catch (Exception problem) {
                        failed.incrementAndGet();
                        left.incrementAndGet();
                        if (failed.get() > 10_000) System.exit(1);
                    }
                }
                finished.countDown();
            }).start();
        }
        finished.await();
        return result(java.util.Collections.nCopies(rows, 0L), (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static String seen(TransactionMQProducer producer, String server, double seconds, double warm, byte[] body) throws Exception {
        String topic = "bench-seen-" + System.nanoTime(); // its own: a new group of RocketMQ begins at a small topic's first message
        List<Long> times = new ArrayList<>();
        CountDownLatch ready = new CountDownLatch(1);
        firstMessage(producer, topic);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(topic);
        consumer.setNamesrvAddr(server);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                ready.countDown();
                if (message.getUserProperty("at") != null) {
                    synchronized (times) {
                        times.add(now - Long.parseLong(message.getUserProperty("at")));
                    }
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        do {
            send(producer, new Message(topic, body));
        } while (!ready.await(20, TimeUnit.MILLISECONDS));
        sendUntil(producer, topic, body, System.nanoTime() + (long) (warm * 1e9));
        Thread.sleep(200);
        begin();
        synchronized (times) {
            times.clear();
        }
        long start = System.nanoTime();
        sendUntil(producer, topic, body, start + (long) (seconds * 1e9));
        Thread.sleep(500);
        synchronized (times) {
            return result(times, (System.nanoTime() - start) / 1e9, 0);
        }
    }

    private static void sendUntil(TransactionMQProducer producer, String topic, byte[] body, long until) throws Exception {
        while (System.nanoTime() < until) {
            Message message = new Message(topic, body);
            message.putUserProperty("at", Long.toString(System.nanoTime()));
            producer.sendMessageInTransaction(message, null);
            Thread.sleep(2);
        }
    }

    private static String asked(TransactionMQProducer producer, Answers answers, int rows, double patience) throws Exception {
        begin();
        long start = System.nanoTime();
        firstMessage(producer, TOPIC); // a client that has sent nothing to a broker is not known to it
        while (answers.asked.size() < rows && System.nanoTime() - start < patience * 1e9) Thread.sleep(20);
        int asked = answers.asked.size();
        double seconds = (System.nanoTime() - start) / 1e9;
        return result(java.util.Collections.nCopies(asked, 0L), seconds, Math.max(rows - asked, 0));
    }

    private static void begin() throws Exception {
        print("ready");
        while (System.in.read() != '\n') continue;
        processorAtBegin = processor();
    }

    private static long processor() {
        return ((com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean())
                .getProcessCpuTime();
    }

    private static String result(Collection<Long> taken, double seconds, long failed) {
        long processorAtEnd = processor();
        long[] nanoseconds = taken.stream().mapToLong(Long::longValue).sorted().toArray();
        return String.format(
                java.util.Locale.ROOT,
                "{\"done\": %d, \"seconds\": %.6f, \"failed\": %d, \"cpu_s\": %.4f, \"p10_ms\": %.4f, \"p50_ms\": %.4f, \"p99_ms\": %.4f}",
                nanoseconds.length,
                seconds,
                failed,
                (processorAtEnd - processorAtBegin) / 1e9,
                centile(nanoseconds, 0.1),
                centile(nanoseconds, 0.5),
                centile(nanoseconds, 0.99));
    }

    private static double centile(long[] sorted, double part) {
        return sorted.length == 0 ? 0 : sorted[(int) (sorted.length * part)] / 1e6;
    }

    private static void print(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
