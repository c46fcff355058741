import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
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
 * Loads a FastMiniMQ broker: {@code MiniLoad HOST:PORT WORK CALLERS SECONDS BODY ROWS START}.
 *
 * <p>Works: {@code threads} (each caller prepares and commits one message after the other), {@code flight} (one thread keeps CALLERS
 * transactions in flight). It writes {@code ready} on standard output when it is warm, waits until START (milliseconds since 1970),
 * writes {@code begin}, and at the end one JSON object.
 */
public final class MiniLoad {
    private static final String TOPIC = "bench";
    private static long startAt;
    private static long processorAtBegin;

    public static void main(String[] arguments) throws Exception {
        int callers = Integer.parseInt(arguments[2]);
        double seconds = Double.parseDouble(arguments[3]);
        byte[] body = new byte[Integer.parseInt(arguments[4])];
        startAt = Long.parseLong(arguments[6]);
        Arrays.fill(body, (byte) 'x');
        MQClusterMetaData cluster = MQRegistry.loadClusterMetaData("bench::bench@" + arguments[0] + ";");
        MQProducer producer = new MQProducer(new MQProducerCfg("bench-producer", "bench"), cluster);
        producer.start();
        for (int warm = 0; warm < 200; warm++) transact(producer, body);
        print("ready");
        Thread.sleep(Math.max(startAt - System.currentTimeMillis(), 0));
        processorAtBegin = processor();
        print("begin");
        print(arguments[1].equals("flight") ? flight(producer, callers, seconds, body) : threads(producer, callers, seconds, body));
        Runtime.getRuntime().halt(0);
    }

    private static boolean transact(MQProducer producer, byte[] body) throws Exception {
        MQRecord record = producer.sendTxMsg(TOPIC, body).get();
        return record.getStatus() == Status.OK && producer.commit(record).get().getStatus() == Status.OK;
    }

    private static String threads(MQProducer producer, int callers, double seconds, byte[] body) throws Exception {
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
                        if (!transact(producer, body)) failed.incrementAndGet();
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
        return result(taken.stream().flatMapToLong(Arrays::stream).toArray(), (System.nanoTime() - start) / 1e9, failed.get());
    }

    private static String flight(MQProducer producer, int most, double seconds, byte[] body) throws Exception {
        Semaphore room = new Semaphore(most);
        AtomicLong done = new AtomicLong();
        AtomicLong failed = new AtomicLong();
        long start = System.nanoTime();
        long until = start + (long) (seconds * 1e9);
        while (System.nanoTime() < until) {
            room.acquire();
            producer.sendTxMsg(TOPIC, body).thenAccept(prepared -> {
                try {
                    producer.commit(prepared).thenAccept(ended -> {
                        (ended.getStatus() == Status.OK ? done : failed).incrementAndGet();
                        room.release();
                    });
                } catch (Exception problem) {
                    failed.incrementAndGet();
                    room.release();
                }
            });
        }
        room.acquire(most);
        return result(new long[(int) done.get()], (System.nanoTime() - start) / 1e9, failed.get());
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
