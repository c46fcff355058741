// The Rust client, as clients/README.md describes.
use std::collections::HashMap;
use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rocketmq::conf::{ClientOption, ProducerOption, SimpleConsumerOption};
use rocketmq::model::common::{FilterExpression, FilterType};
use rocketmq::model::message::{Message, MessageBuilder, MessageView};
use rocketmq::model::transaction::{Transaction, TransactionResolution};
use rocketmq::{Producer, SimpleConsumer};
use serde_json::{json, Value};
use tokio::io::{AsyncBufReadExt, BufReader};

type Failure = Box<dyn Error + Send + Sync>;

fn message_of(request: &Value, topic: &str) -> Result<impl Message, Failure> {
    let text = |name: &str| request[name].as_str().map(str::to_string);
    let body = text("body").unwrap_or_default().into_bytes();
    let mut builder = MessageBuilder::builder().set_topic(topic).set_body(body);
    if let Some(tag) = text("tag") {
        builder = builder.set_tag(tag);
    }
    if let Some(keys) = request["keys"].as_array() {
        builder = builder.set_keys(keys.iter().filter_map(Value::as_str).collect());
    }
    if let Some(properties) = request["properties"].as_object() {
        let pairs = properties.iter().map(|(name, value)| (name.clone(), value.as_str().unwrap_or("").to_string()));
        builder = builder.set_properties(pairs.collect::<HashMap<String, String>>());
    }
    if let Some(group) = text("group") {
        builder = builder.set_message_group(group);
    }
    if let Some(delay) = request["delay"].as_f64() {
        let due = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() + delay;
        builder = builder.set_delivery_timestamp(due.ceil() as i64);
    }
    if request["do"] == "half" {
        builder = builder.enable_transaction();
    }
    Ok(builder.build()?)
}

fn fields_of(message: &MessageView) -> Value {
    let mut keys = message.keys().to_vec();
    keys.sort();
    json!({
        "id": message.message_id(),
        "body": String::from_utf8_lossy(message.body()),
        "keys": keys,
        "tag": message.tag(),
        "properties": message.properties(),
        "group": message.message_group(),
        "attempt": message.delivery_attempt(),
    })
}

fn options(endpoint: &str) -> ClientOption {
    let mut options = ClientOption::default();
    options.set_access_url(endpoint);
    options.set_enable_tls(false);
    options.set_long_polling_timeout(Duration::from_secs(5));
    options
}

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let (endpoint, topic, group, check) = (&words[0], &words[1], &words[2], words[3].clone());
    let mut settings = ProducerOption::default();
    settings.set_topics(vec![topic.as_str()]);
    let checker = move |_: String, message: MessageView| {
        println!("{}", json!({"check": message.message_id()}));
        match check.as_str() {
            "commit" => TransactionResolution::COMMIT,
            "rollback" => TransactionResolution::ROLLBACK,
            _ => TransactionResolution::UNKNOWN,
        }
    };
    let mut producer = Producer::new_transaction_producer(settings, options(endpoint), Box::new(checker))?;
    producer.start().await?;
    let mut consumer = None;
    if !group.is_empty() {
        let mut settings = SimpleConsumerOption::default();
        settings.set_topics(vec![topic.as_str()]);
        settings.set_consumer_group(group);
        let mut started = SimpleConsumer::new(settings, options(endpoint))?;
        started.start().await?;
        consumer = Some(started);
    }
    println!("{}", json!({"ready": true}));
    let all = FilterExpression::new(FilterType::Tag, "*");
    let mut transaction = None;
    let mut received: Vec<MessageView> = Vec::new();
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        let request: Value = serde_json::from_str(&line)?;
        let what = request["do"].as_str().unwrap_or("").to_string();
        if what == "stop" {
            producer.shutdown().await?;
            if let Some(consumer) = consumer {
                consumer.shutdown().await?;
            }
            println!("{}", json!({"ok": true}));
            return Ok(());
        }
        let answer: Result<Value, Failure> = async {
            match what.as_str() {
                "send" => {
                    let receipt = producer.send(message_of(&request, topic)?).await?;
                    return Ok(json!({"id": receipt.message_id()}));
                }
                "half" => {
                    let begun = producer.send_transaction_message(message_of(&request, topic)?).await?;
                    let id = begun.message_id().to_string();
                    transaction = Some(begun);
                    return Ok(json!({ "id": id }));
                }
                "commit" => transaction.take().ok_or("no transaction")?.commit().await?,
                "rollback" => transaction.take().ok_or("no transaction")?.rollback().await?,
                "receive" => {
                    let invisible = Duration::from_secs(request["invisible"].as_u64().unwrap_or(30));
                    let most = request["max"].as_i64().unwrap_or(16) as i32;
                    let consumer = consumer.as_ref().ok_or("no consumer")?;
                    received = consumer.receive_with(topic, &all, most, invisible).await?;
                    return Ok(json!({"messages": received.iter().map(fields_of).collect::<Vec<_>>()}));
                }
                _ => {
                    for message in &received {
                        consumer.as_ref().ok_or("no consumer")?.ack(message).await?;
                    }
                }
            }
            Ok(json!({"ok": true}))
        }
        .await;
        println!("{}", answer.unwrap_or_else(|problem| json!({"error": problem.to_string()})));
    }
    Ok(())
}
