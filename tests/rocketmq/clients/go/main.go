// The Go client, as clients/README.md describes.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strings"
	"sync"
	"time"

	client "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
	v2 "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
)

type request struct {
	Do         string            `json:"do"`
	Body       string            `json:"body"`
	Keys       []string          `json:"keys"`
	Tag        *string           `json:"tag"`
	Properties map[string]string `json:"properties"`
	Group      *string           `json:"group"`
	Delay      float64           `json:"delay"`
	Max        int32             `json:"max"`
	Invisible  int               `json:"invisible"`
	Handle     string            `json:"handle"`
	Failures   int32             `json:"failures"`
}

type answer = map[string]any

var printing sync.Mutex

func show(one answer) {
	text, err := json.Marshal(one)
	if err != nil {
		panic(err)
	}
	printing.Lock()
	defer printing.Unlock()
	fmt.Println(string(text))
}

func messageOf(asked request, topic string) *client.Message {
	message := &client.Message{Topic: topic, Body: []byte(asked.Body)}
	if asked.Tag != nil {
		message.SetTag(*asked.Tag)
	}
	if len(asked.Keys) > 0 {
		message.SetKeys(asked.Keys...)
	}
	for name, value := range asked.Properties {
		message.AddProperty(name, value)
	}
	if asked.Group != nil {
		message.SetMessageGroup(*asked.Group)
	}
	if asked.Delay > 0 {
		message.SetDelayTimestamp(time.Now().Add(time.Duration(asked.Delay * float64(time.Second))))
	}
	return message
}

func fieldsOf(message *client.MessageView) answer {
	keys := append([]string{}, message.GetKeys()...)
	sort.Strings(keys)
	properties := message.GetProperties()
	if properties == nil {
		properties = map[string]string{}
	}
	return answer{
		"id": message.GetMessageId(), "body": string(message.GetBody()), "keys": keys, "tag": message.GetTag(),
		"properties": properties, "group": message.GetMessageGroup(), "attempt": message.GetDeliveryAttempt(),
	}
}

type program struct {
	topic       string
	producer    client.Producer
	consumer    client.SimpleConsumer
	transaction client.Transaction
	received    []*client.MessageView
	pushing     []client.PushConsumer
}

func (p *program) push(group string, failures int32) error {
	listener := &client.FuncMessageListener{Consume: func(message *client.MessageView) client.ConsumerResult {
		show(answer{"pushed": fieldsOf(message)})
		if message.GetDeliveryAttempt() <= failures {
			return client.FAILURE
		}
		return client.SUCCESS
	}}
	all := map[string]*client.FilterExpression{p.topic: client.SUB_ALL}
	made, err := client.NewPushConsumer(configuration(group), client.WithPushAwaitDuration(5*time.Second),
		client.WithPushSubscriptionExpressions(all), client.WithPushMessageListener(listener))
	if err != nil {
		return err
	}
	p.pushing = append(p.pushing, made)
	return made.Start()
}

func (p *program) do(asked request) (answer, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 40*time.Second)
	defer cancel()
	done := answer{"ok": true}
	switch asked.Do {
	case "send":
		receipts, err := p.producer.Send(ctx, messageOf(asked, p.topic))
		if err != nil {
			return nil, err
		}
		return answer{"id": receipts[0].MessageID, "handle": receipts[0].RecallHandle}, nil
	case "recall":
		id, err := p.producer.Recall(ctx, p.topic, asked.Handle)
		return answer{"id": id}, err
	case "push":
		return done, p.push(*asked.Group, asked.Failures)
	case "half":
		p.transaction = p.producer.BeginTransaction()
		receipts, err := p.producer.SendWithTransaction(ctx, messageOf(asked, p.topic), p.transaction)
		if err != nil {
			return nil, err
		}
		return answer{"id": receipts[0].MessageID}, nil
	case "commit":
		return done, p.transaction.Commit()
	case "rollback":
		return done, p.transaction.RollBack()
	case "receive":
		var err error
		p.received, err = p.consumer.Receive(ctx, asked.Max, time.Duration(asked.Invisible)*time.Second)
		var status *client.ErrRpcStatus
		if err != nil && !(errors.As(err, &status) && status.GetCode() == int32(v2.Code_MESSAGE_NOT_FOUND)) {
			return nil, err
		}
		messages := []answer{}
		for _, message := range p.received {
			messages = append(messages, fieldsOf(message))
		}
		return answer{"messages": messages}, nil
	case "ack":
		for _, message := range p.received {
			if err := p.consumer.Ack(ctx, message); err != nil {
				return nil, err
			}
		}
		return done, nil
	default: // stop
		err := p.producer.GracefulStop()
		if p.consumer != nil {
			err = errors.Join(err, p.consumer.GracefulStop())
		}
		for _, one := range p.pushing {
			err = errors.Join(err, one.GracefulStop())
		}
		return done, err
	}
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func configuration(group string) *client.Config {
	return &client.Config{Endpoint: os.Args[1], ConsumerGroup: group, Credentials: &credentials.SessionCredentials{}}
}

func main() {
	topic, group, check := os.Args[2], os.Args[3], os.Args[4]
	client.EnableSsl = false
	resolution := map[string]client.TransactionResolution{"commit": client.COMMIT, "rollback": client.ROLLBACK}[check]
	checker := &client.TransactionChecker{Check: func(message *client.MessageView) client.TransactionResolution {
		show(answer{"check": message.GetMessageId()})
		return resolution
	}}
	p := &program{topic: topic}
	var err error
	p.producer, err = client.NewProducer(configuration(group), client.WithTransactionChecker(checker), client.WithTopics(topic))
	must(err)
	must(p.producer.Start())
	if group != "" {
		p.consumer, err = client.NewSimpleConsumer(configuration(group),
			client.WithSimpleAwaitDuration(5*time.Second),
			client.WithSimpleSubscriptionExpressions(map[string]*client.FilterExpression{topic: client.SUB_ALL}))
		must(err)
		must(p.consumer.Start())
	}
	show(answer{"ready": true})
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var asked request
		must(json.NewDecoder(strings.NewReader(lines.Text())).Decode(&asked))
		found, err := p.do(asked)
		if err != nil {
			found = answer{"error": err.Error()}
		}
		show(found)
		if asked.Do == "stop" {
			return
		}
	}
}
