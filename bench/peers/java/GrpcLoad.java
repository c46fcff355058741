import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.Collections;
import java.util.List;
import java.util.Locale;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;

/**
 * Loads a RocketMQ proxy, or whatever answers as one, with RocketMQ's gRPC client: {@code GrpcLoad ENDPOINT WORK CALLERS SECONDS WARM BODY
 * ROWS}.
 *
 * <p>Works: {@code threads} (each caller sends one half message after the other and commits it; a local commit costs nothing here),
 * {@code prepare} (ROWS half messages without a decision), {@code first} (one transaction, as soon as the server takes it), {@code asked}
 * (waits until ROWS half messages were checked, and leaves them undecided). It does its work for WARM seconds that do not count, writes
 * {@code ready} on standard output, waits for a line on standard input, and writes one JSON object at the end.
 */
public final class GrpcLoad {
    private static final String TOPIC = "bench";
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();
    private static final Set<String> CHECKED = ConcurrentHashMap.newKeySet();
    private static long processorAtBegin;

    /** One caller's step. */
    private interface Step {
        void run() throws Exception;
    }

    public static void main(String[] arguments) throws Exception {
        String endpoint = arguments[0];
        String work = arguments[1];
        int callers = Integer.parseInt(arguments[2]);
        double seconds = Double.parseDouble(arguments[3]);
        double warm = Double.parseDouble(arguments[4]);
        byte[] body = new byte[Integer.parseInt(arguments[5])];
        int rows = Integer.parseInt(arguments[6]);
        Arrays.fill(body, (byte) 'x');
        if (work.equals("first")) begin();
        long start = System.nanoTime();
        Producer producer = producer(endpoint);
        switch (work) {
            case "threads" -> {
                commitOne(producer, body);
                callUntil(callers, warm, () -> commitOne(producer, body));
                begin();
                System.out.println(callUntil(callers, seconds, () -> commitOne(producer, body)));
            }
            case "prepare" -> System.out.println(prepare(producer, callers, rows, body));
            case "first" -> {
                insist(() -> commitOne(producer, body));
                long taken = System.nanoTime() - start;
                System.out.println(result(List.of(taken), taken / 1e9, 0));
            }
            case "asked" -> System.out.println(awaitChecks(rows, seconds));
            default -> throw new IllegalArgumentException(work);
        }
        System.out.flush();
        Runtime.getRuntime().halt(0); // the client's own way to an end takes seconds
    }

    private static Producer producer(String endpoint) throws Exception {
        ClientConfiguration configuration =
                ClientConfiguration.newBuilder().setEndpoints(endpoint).enableSsl(false).build();
        Producer[] made = new Producer[1];
        insist(() -> made[0] = PROVIDER.newProducerBuilder()
                .setClientConfiguration(configuration)
                .setTopics(TOPIC)
                .setTransactionChecker(message -> {
                    CHECKED.add(message.getMessageId().toString());
                    return TransactionResolution.UNKNOWN;
                })
                .build());
        return made[0];
    }

    /** Repeats until it succeeds: a server that has just been started may reject calls for some time. */
    private static void insist(Step step) throws Exception {
        for (int attempt = 0; ; attempt++) {
            try {
                step.run();
                return;
            } catch (Exception problem) {
                if (attempt > 2000) throw problem;
                Thread.sleep(10);
            }
        }
    }

    private static Message message(byte[] body) {
        return PROVIDER.newMessageBuilder().setTopic(TOPIC).setBody(body).build();
    }

    private static void commitOne(Producer producer, byte[] body) throws Exception {
        Transaction transaction = producer.beginTransaction();
        producer.send(message(body), transaction);
        transaction.commit();
    }

    private static String callUntil(int callers, double seconds, Step step) throws Exception {
        AtomicLong failed = new AtomicLong();
        List<Long> all = new ArrayList<>();
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        inThreads(callers, () -> {
            List<Long> times = new ArrayList<>();
            for (long begin = System.nanoTime(); begin < until; begin = System.nanoTime()) {
                try {
                    step.run();
                    times.add(System.nanoTime() - begin);
                } catch (Exception problem) {
                    failed.incrementAndGet();
                }
            }
            synchronized (all) {
                all.addAll(times);
            }
        });
        return result(all, (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static String prepare(Producer producer, int callers, int rows, byte[] body) throws Exception {
        AtomicLong left = new AtomicLong(rows);
        AtomicLong failed = new AtomicLong();
        begin();
        long start = System.nanoTime();
        inThreads(callers, () -> {
            while (left.decrementAndGet() >= 0) {
                try {
                    producer.send(message(body), producer.beginTransaction());
                } catch (Exception problem) {
                    left.incrementAndGet();
                    if (failed.incrementAndGet() == 1) problem.printStackTrace();
                    if (failed.get() > 10_000) Runtime.getRuntime().halt(1);
                }
            }
        });
        return result(Collections.nCopies(rows, 0L), (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static void inThreads(int callers, Step step) throws Exception {
        CountDownLatch finished = new CountDownLatch(callers);
        for (int caller = 0; caller < callers; caller++) {
            new Thread(() -> {
                try {
                    step.run();
                } catch (Exception problem) {
                    problem.printStackTrace();
                } finally {
                    finished.countDown();
                }
            }).start();
        }
        finished.await();
    }

    private static String awaitChecks(int rows, double patience) throws Exception {
        begin();
        long start = System.nanoTime();
        while (CHECKED.size() < rows && System.nanoTime() - start < patience * 1e9) Thread.sleep(20);
        int checked = CHECKED.size();
        return result(Collections.nCopies(checked, 0L), (System.nanoTime() - start) / 1e9, Math.max(rows - checked, 0));
    }

    private static void begin() throws Exception {
        System.out.println("ready");
        System.out.flush();
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
                Locale.ROOT,
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
}
