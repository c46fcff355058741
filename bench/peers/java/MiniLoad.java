import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.Semaphore;
import java.util.concurrent.atomic.AtomicLong;
import org.nopasserby.fastminimq.MQConstants.Status;
import org.nopasserby.fastminimq.MQProducer;
import org.nopasserby.fastminimq.MQProducer.MQProducerCfg;
import org.nopasserby.fastminimq.MQRegistry;
import org.nopasserby.fastminimq.MQRegistry.MQClusterMetaData;
import org.nopasserby.fastminimq.MQResult.MQRecord;

/**
 * Loads a FastMiniMQ broker: {@code MiniLoad HOST:PORT WORK CALLERS SECONDS WARM BODY ROWS}.
 *
 * <p>Works: {@code threads} (each caller prepares and commits one message after the other), {@code flight} (one thread keeps CALLERS
 * transactions in flight), {@code queue} (ROWS committed messages). It does its work for WARM seconds that do not count, writes
 * {@code ready} on standard output, waits for a line on standard input, and writes one JSON object at the end.
 */
public final class MiniLoad {
    private static final String TOPIC = "bench";
    private static long processorAtBegin;

    public static void main(String[] arguments) throws Exception {
        String work = arguments[1];
        int callers = Integer.parseInt(arguments[2]);
        double seconds = Double.parseDouble(arguments[3]);
        double warm = Double.parseDouble(arguments[4]);
        byte[] body = new byte[Integer.parseInt(arguments[5])];
        long rows = Long.parseLong(arguments[6]);
        Arrays.fill(body, (byte) 'x');
        MQClusterMetaData cluster = MQRegistry.loadClusterMetaData("bench::bench@" + arguments[0] + ";");
        MQProducer producer = new MQProducer(new MQProducerCfg("bench-producer", "bench"), cluster);
        producer.start();
        transact(producer, body);
        switch (work) {
            case "threads" -> {
                threads(producer, callers, warm, body);
                begin();
                print(threads(producer, callers, seconds, body));
            }
            case "flight" -> {
                flight(producer, callers, warm, Long.MAX_VALUE, body);
                begin();
                print(flight(producer, callers, seconds, Long.MAX_VALUE, body));
            }
            case "queue" -> {
                begin();
                print(flight(producer, callers, 3600, rows, body));
            }
            default -> throw new IllegalArgumentException(work);
        }
        Runtime.getRuntime().halt(0);
    }

    private static boolean transact(MQProducer producer, byte[] body) throws Exception {
        MQRecord record = producer.sendTxMsg(TOPIC, body).get();
        return record.getStatus() == Status.OK && producer.commit(record).get().getStatus() == Status.OK;
    }

    private static String threads(MQProducer producer, int callers, double seconds, byte[] body) throws Exception {
        AtomicLong failed = new AtomicLong();
        List<Long> all = new ArrayList<>();
        CountDownLatch finished = new CountDownLatch(callers);
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        for (int caller = 0; caller < callers; caller++) {
            new Thread(() -> {
                List<Long> times = new ArrayList<>();
                while (System.nanoTime() < until) {
                    long begin = System.nanoTime();
                    try {
                        if (!transact(producer, body)) failed.incrementAndGet();
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

    private static String flight(MQProducer producer, int most, double seconds, long rows, byte[] body) throws Exception {
        Semaphore room = new Semaphore(most);
        ConcurrentLinkedQueue<Long> times = new ConcurrentLinkedQueue<>();
        AtomicLong failed = new AtomicLong();
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        for (long begun = 0; begun < rows && System.nanoTime() < until; begun++) {
            room.acquire();
            long begin = System.nanoTime();
            producer.sendTxMsg(TOPIC, body).thenAccept(prepared -> {
                try {
                    producer.commit(prepared).thenAccept(ended -> {
                        if (ended.getStatus() == Status.OK) times.add(System.nanoTime() - begin);
                        else failed.incrementAndGet();
                        room.release();
                    });
                } catch (Exception problem) {
                    failed.incrementAndGet();
                    room.release();
                }
            });
        }
        room.acquire(most);
        return result(times, (System.nanoTime() - start) / 1e9, failed.get());
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

    private static String result(java.util.Collection<Long> taken, double seconds, long failed) {
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
