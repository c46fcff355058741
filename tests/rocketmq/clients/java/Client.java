// The Java client, as clients/README.md describes.
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeSet;
import org.apache.rocketmq.client.apis.ClientConfiguration;
import org.apache.rocketmq.client.apis.ClientServiceProvider;
import org.apache.rocketmq.client.apis.consumer.ConsumeResult;
import org.apache.rocketmq.client.apis.consumer.FilterExpression;
import org.apache.rocketmq.client.apis.consumer.PushConsumer;
import org.apache.rocketmq.client.apis.consumer.SimpleConsumer;
import org.apache.rocketmq.client.apis.message.Message;
import org.apache.rocketmq.client.apis.message.MessageBuilder;
import org.apache.rocketmq.client.apis.message.MessageView;
import org.apache.rocketmq.client.apis.producer.Producer;
import org.apache.rocketmq.client.apis.producer.SendReceipt;
import org.apache.rocketmq.client.apis.producer.Transaction;
import org.apache.rocketmq.client.apis.producer.TransactionResolution;
import org.apache.rocketmq.shaded.com.google.gson.Gson;
import org.apache.rocketmq.shaded.com.google.gson.GsonBuilder;
import org.apache.rocketmq.shaded.com.google.gson.JsonElement;
import org.apache.rocketmq.shaded.com.google.gson.JsonObject;
import org.apache.rocketmq.shaded.com.google.gson.JsonParser;

public class Client {
    private static final Gson GSON = new GsonBuilder().serializeNulls().create();
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    private static final ClientServiceProvider PROVIDER = ClientServiceProvider.loadService();

    private static synchronized void show(Map<String, ?> answer) {
        OUT.println(GSON.toJson(answer));
    }

    private static Message messageOf(JsonObject request, String topic) {
        MessageBuilder builder = PROVIDER.newMessageBuilder().setTopic(topic)
            .setBody(request.get("body").getAsString().getBytes(StandardCharsets.UTF_8));
        if (request.has("tag")) {
            builder.setTag(request.get("tag").getAsString());
        }
        if (request.has("keys")) {
            List<String> keys = new ArrayList<>();
            request.getAsJsonArray("keys").forEach(key -> keys.add(key.getAsString()));
            builder.setKeys(keys.toArray(new String[0]));
        }
        if (request.has("properties")) {
            for (Map.Entry<String, JsonElement> one : request.getAsJsonObject("properties").entrySet()) {
                builder.addProperty(one.getKey(), one.getValue().getAsString());
            }
        }
        if (request.has("group")) {
            builder.setMessageGroup(request.get("group").getAsString());
        }
        if (request.has("delay")) {
            builder.setDeliveryTimestamp(System.currentTimeMillis() + (long) (request.get("delay").getAsDouble() * 1000));
        }
        return builder.build();
    }

    private static Map<String, Object> fieldsOf(MessageView message) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("id", message.getMessageId().toString());
        fields.put("body", StandardCharsets.UTF_8.decode(message.getBody()).toString());
        fields.put("keys", new TreeSet<>(message.getKeys()));
        fields.put("tag", message.getTag().orElse(null));
        fields.put("properties", message.getProperties());
        fields.put("group", message.getMessageGroup().orElse(null));
        fields.put("attempt", message.getDeliveryAttempt());
        return fields;
    }

    private static PushConsumer push(JsonObject request, String topic, ClientConfiguration configuration)
        throws Exception {
        int failures = request.get("failures").getAsInt();
        return PROVIDER.newPushConsumerBuilder().setClientConfiguration(configuration)
            .setConsumerGroup(request.get("group").getAsString())
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL))
            .setMessageListener(message -> {
                show(Map.of("pushed", fieldsOf(message)));
                return message.getDeliveryAttempt() <= failures ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
            }).build();
    }

    public static void main(String[] words) throws Exception {
        String topic = words[1];
        String group = words[2];
        TransactionResolution resolution = words[3].equals("commit") ? TransactionResolution.COMMIT
            : words[3].equals("rollback") ? TransactionResolution.ROLLBACK : TransactionResolution.UNKNOWN;
        ClientConfiguration configuration = ClientConfiguration.newBuilder()
            .setEndpoints(words[0]).enableSsl(false).build();
        Producer producer = PROVIDER.newProducerBuilder().setClientConfiguration(configuration).setTopics(topic)
            .setTransactionChecker(message -> {
                show(Map.of("check", message.getMessageId().toString()));
                return resolution;
            }).build();
        SimpleConsumer consumer = group.isEmpty() ? null : PROVIDER.newSimpleConsumerBuilder()
            .setClientConfiguration(configuration).setConsumerGroup(group).setAwaitDuration(Duration.ofSeconds(5))
            .setSubscriptionExpressions(Collections.singletonMap(topic, FilterExpression.SUB_ALL)).build();
        show(Map.of("ready", true));
        Transaction transaction = null;
        List<MessageView> received = List.of();
        List<PushConsumer> pushing = new ArrayList<>();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = input.readLine(); line != null; line = input.readLine()) {
            JsonObject request = JsonParser.parseString(line).getAsJsonObject();
            String what = request.get("do").getAsString();
            try {
                switch (what) {
                    case "send":
                        SendReceipt receipt = producer.send(messageOf(request, topic));
                        show(Map.of("id", receipt.getMessageId().toString(), "handle", receipt.getRecallHandle()));
                        continue;
                    case "recall":
                        show(Map.of("id",
                            producer.recallMessage(topic, request.get("handle").getAsString()).getMessageId()
                                .toString()));
                        continue;
                    case "half":
                        transaction = producer.beginTransaction();
                        show(Map.of("id",
                            producer.send(messageOf(request, topic), transaction).getMessageId().toString()));
                        continue;
                    case "receive":
                        received = consumer.receive(request.get("max").getAsInt(),
                            Duration.ofSeconds(request.get("invisible").getAsInt()));
                        List<Map<String, Object>> messages = new ArrayList<>();
                        received.forEach(message -> messages.add(fieldsOf(message)));
                        show(Map.of("messages", messages));
                        continue;
                    case "push":
                        pushing.add(push(request, topic, configuration));
                        break;
                    case "commit":
                        transaction.commit();
                        break;
                    case "rollback":
                        transaction.rollback();
                        break;
                    case "ack":
                        for (MessageView message : received) {
                            consumer.ack(message);
                        }
                        break;
                    default: // stop
                        producer.close();
                        if (consumer != null) {
                            consumer.close();
                        }
                        for (PushConsumer one : pushing) {
                            one.close();
                        }
                }
                show(Map.of("ok", true));
            } catch (Exception problem) {
                show(Map.of("error", String.valueOf(problem)));
            }
            if (what.equals("stop")) {
                System.exit(0);
            }
        }
    }
}
