// A client of EscrowMQ in one file: a transaction with check-back, a receive, an acknowledgement. docs/reference/protocol.md has the bytes.
//
//	go run main.go 127.0.0.1:7700
package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
)

const (
	hello, send, prepare, end, settle, receive, action, watch              = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x0b, 0x0e
	welcome, rows, codes, batch, failure, result, checks                   = 0x81, 0x82, 0x83, 0x84, 0x86, 0x87, 0x8d
	bodyOffsets, bodyData, offsetColumn, leaseColumn, transactionOfAChecks = 19, 20, 26, 36, 1 // buffers of the Arrow schemas
)

type client struct {
	net.Conn
	number uint64
}

type frame struct {
	kind byte
	body []byte
}

// pack appends one value in msgpack.
func pack(to []byte, value any) []byte {
	switch v := value.(type) {
	case nil:
		return append(to, 0xc0)
	case int:
		return binary.BigEndian.AppendUint64(append(to, 0xd3), uint64(v))
	case string:
		return append(append(to, 0xd9, byte(len(v))), v...)
	case []byte:
		return append(binary.BigEndian.AppendUint32(append(to, 0xc6), uint32(len(v))), v...)
	case map[string]any:
		to = append(to, 0x80|byte(len(v)))
		for name, one := range v {
			to = pack(pack(to, name), one)
		}
		return to
	case []any:
		to = append(to, 0x90|byte(len(v)))
		for _, one := range v {
			to = pack(to, one)
		}
		return to
	}
	panic(fmt.Sprintf("%T cannot be packed", value))
}

// ask sends a frame under the next number; the greeting has 0.
func (c *client) ask(kind byte, head, body []byte) {
	padding := (8 - len(head)%8) % 8
	out := binary.LittleEndian.AppendUint32(nil, uint32(12+len(head)+padding+len(body)))
	out = binary.LittleEndian.AppendUint16(append(out, kind, 0), uint16(len(head)))
	out = binary.LittleEndian.AppendUint64(out, c.number)
	c.number++
	out = append(append(append(out, head...), make([]byte, padding)...), body...)
	if _, problem := c.Write(out); problem != nil {
		panic(problem)
	}
}

// next reads a frame. Answers of this example are small, so none comes in parts.
func (c *client) next() frame {
	header := make([]byte, 16)
	if _, problem := io.ReadFull(c, header); problem != nil {
		panic(problem)
	}
	content := make([]byte, binary.LittleEndian.Uint32(header)-12)
	if _, problem := io.ReadFull(c, content); problem != nil {
		panic(problem)
	}
	head := (int(binary.LittleEndian.Uint16(header[6:])) + 7) / 8 * 8
	came := frame{header[4], content[head:]}
	if came.kind == failure {
		panic(fmt.Sprintf("the broker refuses: %q", came.body))
	}
	return came
}

// wait reads frames until one has this kind.
func (c *client) wait(kind byte) []byte {
	for {
		if came := c.next(); came.kind == kind {
			return came.body
		}
	}
}

func (c *client) act(name string, request map[string]any) (answer map[string]any) {
	body, _ := json.Marshal(request)
	c.ask(action, pack(nil, name), body)
	if problem := json.Unmarshal(c.wait(result), &answer); problem != nil {
		panic(problem)
	}
	return answer
}

// column returns a buffer of an Arrow IPC message: a mark, the length of a flatbuffer, the flatbuffer, the buffers.
func column(message []byte, index int) []byte {
	at := func(place int) int { return int(binary.LittleEndian.Uint32(message[place:])) }
	field := func(table, number int) int { // the place of a field of a table
		shape := table - int(int32(at(table)))
		return table + int(binary.LittleEndian.Uint16(message[shape+4+2*number:]))
	}
	follow := func(place int) int { return place + at(place) }
	header := follow(field(follow(8), 2))
	entry := follow(field(header, 2)) + 4 + 16*index
	start := 8 + at(4) + int(binary.LittleEndian.Uint64(message[entry:]))
	return message[start : start+int(binary.LittleEndian.Uint64(message[entry+8:]))]
}

func main() {
	connection, problem := net.Dial("tcp", os.Args[1])
	if problem != nil {
		panic(problem)
	}
	c := &client{Conn: connection}
	c.ask(hello, pack(nil, []any{[]byte("EscrowMQ"), 2, 1, nil}), nil)
	c.wait(welcome)
	c.act("groups.subscribe", map[string]any{"group": "go", "topics": []string{"from-go"}})
	session := int(c.act("session.open", map[string]any{"group": "go", "instance": "one", "transactional": true})["session"].(float64))
	c.ask(watch, pack(nil, session), nil)
	c.wait(checks) // an empty batch: from now on the broker asks
	message := []any{"from-go", []byte("hello"), nil, nil, nil, nil, -1, 0, 0, 0, nil}
	c.ask(prepare, nil, pack(nil, []any{pack(nil, map[string]any{"session": session}), []any{message}, []any{1, 1}}))
	c.wait(rows) // the half message is durable; its outcome gets lost, so the broker asks
	transaction := column(c.wait(checks), transactionOfAChecks)[:16]
	answer := pack(nil, map[string]any{"session": session, "by": 1})
	c.ask(end, nil, pack(nil, []any{answer, []any{[]any{transaction, 1}}}))
	fmt.Println("committed by check-back:", c.wait(codes)[0] == 1)
	c.ask(receive, pack(nil, map[string]any{"group": "go", "member": 1, "wait_ms": 10000}), nil)
	came := c.wait(batch)
	size := binary.LittleEndian.Uint32(column(came, bodyOffsets)[4:])
	fmt.Println("received:", string(column(came, bodyData)[:size]))
	lease, offset := binary.LittleEndian.Uint64(column(came, leaseColumn)), binary.LittleEndian.Uint64(column(came, offsetColumn))
	done := []any{int(lease), int(offset), 1, 0, 0, nil}
	c.ask(settle, nil, pack(nil, []any{pack(nil, map[string]any{"group": "go"}), []any{done}}))
	fmt.Println("acknowledged:", c.wait(codes)[0] == 0)
}
