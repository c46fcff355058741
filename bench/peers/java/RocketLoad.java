import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.ThreadPoolExecutor;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.concurrent.atomic.AtomicLong;
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
 * Loads a RocketMQ broker: {@code RocketLoad NAMESERVER WORK CALLERS SECONDS BODY ROWS START}.
 *
 * <p>Works: {@code threads} (each caller sends one transactional message after the other and commits it), {@code seen} (one caller,
 * and a consumer that waits), {@code prepare} (ROWS half messages without a decision), {@code asked} (waits until ROWS of them were
 * asked about), {@code queue} (ROWS committed messages). It writes {@code ready} on standard output when it is warm, waits until
 * START (milliseconds since 1970), writes {@code begin}, and at the end one JSON object.
 */
public final class RocketLoad {
    private static final String TOPIC = "bench";
    private static final String GROUP = "bench-producers";
    private static long startAt;
    private static long processorAtBegin;

    public static void main(String[] arguments) throws Exception {
        String server = arguments[0];
        String work = arguments[1];
        int callers = Integer.parseInt(arguments[2]);
        double seconds = Double.parseDouble(arguments[3]);
        byte[] body = new byte[Integer.parseInt(arguments[4])];
        int rows = Integer.parseInt(arguments[5]);
        startAt = Long.parseLong(arguments[6]);
        Arrays.fill(body, (byte) 'x');
        Answers answers = new Answers(work.equals("prepare") || work.equals("asked"));
        TransactionMQProducer producer = producer(server, answers, work.equals("seen") ? 1 : Math.max(callers, 4));
        switch (work) {
            case "threads" -> print(threads(producer, callers, seconds, body));
            case "prepare", "queue" -> print(rows(producer, callers, rows, body));
            case "seen" -> print(seen(producer, server, seconds, body));
            case "asked" -> print(asked(answers, rows, seconds));
            default -> throw new IllegalArgumentException(work);
        }
        System.out.flush();
        Runtime.getRuntime().halt(0); // its clients' own ways to an end take seconds
    }

    /** Decides at once, or leaves undecided; counts whom it was asked about. */
    private static final class Answers implements TransactionListener {
        final java.util.Set<String> asked = ConcurrentHashMap.newKeySet();
        private final LocalTransactionState state;

        Answers(boolean undecided) {
            state = undecided ? LocalTransactionState.UNKNOW : LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return state;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            asked.add(message.getTransactionId());
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }

    private static TransactionMQProducer producer(String server, Answers answers, int threads) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer(GROUP);
        producer.setNamesrvAddr(server);
        producer.setTransactionListener(answers);
        producer.setSendMsgTimeout(20_000);
        producer.setExecutorService(
                new ThreadPoolExecutor(threads, threads, 10, TimeUnit.SECONDS, new LinkedBlockingQueue<>(200_000)));
        producer.start();
        for (int attempt = 0; ; attempt++) { // the topic is made by the first message, and its route takes a moment
            try {
                send(producer, new byte[] {'0'});
                return producer;
            } catch (Exception problem) {
                if (attempt > 200) throw problem;
                Thread.sleep(50);
            }
        }
    }

    private static boolean send(TransactionMQProducer producer, byte[] body) throws Exception {
        TransactionSendResult result = producer.sendMessageInTransaction(new Message(TOPIC, body), null);
        return result.getSendStatus() == SendStatus.SEND_OK;
    }

    private static String threads(TransactionMQProducer producer, int callers, double seconds, byte[] body) throws Exception {
        for (int warm = 0; warm < 200; warm++) send(producer, body);
        begin();
        AtomicLong failed = new AtomicLong();
        List<long[]> taken = new ArrayList<>();
        CountDownLatch finished = new CountDownLatch(callers);
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        for (int caller = 0; caller < callers; caller++) {
            new Thread(() -> {
                long[] times = new long[1 << 20];
                int done = 0;
                while (System.nanoTime() < until && done < times.length) {
                    long begin = System.nanoTime();
                    try {
                        if (!send(producer, body)) failed.incrementAndGet();
                        else times[done++] = System.nanoTime() - begin;
                    } catch (Exception problem) {
                        failed.incrementAndGet();
                    }
                }
                synchronized (taken) {
                    taken.add(Arrays.copyOf(times, done));
                }
                finished.countDown();
            }).start();
        }
        finished.await();
        long[] all = taken.stream().flatMapToLong(Arrays::stream).toArray();
        return result(all, (System.nanoTime() - start) / 1e9, failed.get());
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
                        if (!send(producer, body)) throw new IllegalStateException("not stored and synced");
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
        return result(new long[rows], (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static String seen(TransactionMQProducer producer, String server, double seconds, byte[] body) throws Exception {
        List<Long> times = new ArrayList<>();
        AtomicBoolean measures = new AtomicBoolean();
        CountDownLatch ready = new CountDownLatch(1);
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench-consumers-" + System.nanoTime());
        consumer.setNamesrvAddr(server);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        consumer.subscribe(TOPIC, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = System.nanoTime();
            for (MessageExt message : messages) {
                ready.countDown();
                if (measures.get() && message.getUserProperty("at") != null) {
                    synchronized (times) {
                        times.add(now - Long.parseLong(message.getUserProperty("at")));
                    }
                }
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        do {
            send(producer, body);
        } while (!ready.await(20, TimeUnit.MILLISECONDS));
        measures.set(true);
        begin();
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        while (System.nanoTime() < until) {
            Message message = new Message(TOPIC, body);
            message.putUserProperty("at", Long.toString(System.nanoTime()));
            producer.sendMessageInTransaction(message, null);
            Thread.sleep(2);
        }
        Thread.sleep(500);
        synchronized (times) {
            long[] all = times.stream().mapToLong(Long::longValue).toArray();
            return result(all, (System.nanoTime() - start) / 1e9, 0);
        }
    }

    private static String asked(Answers answers, int rows, double patience) throws Exception {
        begin();
        long start = System.nanoTime();
        while (answers.asked.size() < rows && System.nanoTime() - start < patience * 1e9) Thread.sleep(20);
        return result(new long[answers.asked.size()], (System.nanoTime() - start) / 1e9, Math.max(rows - answers.asked.size(), 0));
    }

    private static void begin() throws Exception {
        print("ready");
        Thread.sleep(Math.max(startAt - System.currentTimeMillis(), 0));
        processorAtBegin = processor();
        print("begin");
    }

    private static long processor() {
        return ((com.sun.management.OperatingSystemMXBean) java.lang.management.ManagementFactory.getOperatingSystemMXBean())
                .getProcessCpuTime();
    }

    private static String result(long[] nanoseconds, double seconds, long failed) {
        Arrays.sort(nanoseconds);
        int size = nanoseconds.length;
        return String.format(
                java.util.Locale.ROOT,
                "{\"done\": %d, \"seconds\": %.6f, \"failed\": %d, \"cpu_s\": %.4f, \"p50_ms\": %.4f, \"p99_ms\": %.4f}",
                size,
                seconds,
                failed,
                (processor() - processorAtBegin) / 1e9,
                size == 0 ? 0 : nanoseconds[size / 2] / 1e6,
                size == 0 ? 0 : nanoseconds[Math.min(size - 1, size * 99 / 100)] / 1e6);
    }

    private static void print(String line) {
        System.out.println(line);
        System.out.flush();
    }
}
