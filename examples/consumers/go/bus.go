package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"
)

const answerWithin = 5 * time.Second

// bus is a connection that outlives restarts of the server.
type bus struct {
	connection *nats.Conn
	denied     chan error
	zstd       *zstd.Decoder
}

// question asks for the first message at or after a sequence or a time, or for the last one, on these subjects.
type question struct {
	Seq           uint64 `json:"seq,omitempty"`
	StartTime     string `json:"start_time,omitempty"`
	NextBySubject string `json:"next_by_subj,omitempty"`
	LastBySubject string `json:"last_by_subj,omitempty"`
}

func open() (*bus, error) {
	unpacker, err := zstd.NewReader(nil)
	if err != nil {
		return nil, err
	}
	made := &bus{denied: make(chan error, 1), zstd: unpacker}
	options := []nats.Option{nats.MaxReconnects(-1), nats.ReconnectWait(idle), nats.ErrorHandler(made.onError)}
	if file := os.Getenv("OPENFORGE_NATS_NKEY_SEED_FILE"); file != "" {
		key, err := nats.NkeyOptionFromSeed(file)
		if err != nil {
			return nil, err
		}
		inbox, err := inboxOf(file)
		if err != nil {
			return nil, err
		}
		options = append(options, key, nats.CustomInboxPrefix(inbox))
	}
	url := os.Getenv("OPENFORGE_NATS_URL")
	if url == "" {
		url = nats.DefaultURL
	}
	made.connection, err = nats.Connect(url, options...)
	return made, err
}

// inboxOf is the only place where the holder of this seed may hear answers.
func inboxOf(file string) (string, error) {
	seed, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	pair, err := nkeys.FromSeed(bytes.TrimSpace(seed))
	if err != nil {
		return "", err
	}
	public, err := pair.PublicKey()
	return "_INBOX." + public, err
}

func (b *bus) onError(_ *nats.Conn, _ *nats.Subscription, err error) {
	if strings.Contains(strings.ToLower(err.Error()), "permissions violation") {
		select {
		case b.denied <- err:
		default:
		}
	}
}

// ask puts a question that may be asked again: breaks and restarts of the server are waited out.
func (b *bus) ask(subject string, body any, header nats.Header) (*nats.Msg, error) {
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	for {
		asked := &nats.Msg{Subject: subject, Header: header, Data: data}
		answer, err := b.connection.RequestMsg(asked, answerWithin)
		if err == nil {
			return answer, nil
		}
		select {
		case denied := <-b.denied:
			return nil, denied
		default:
		}
		if errors.Is(err, nats.ErrConnectionClosed) {
			return nil, err
		}
		time.Sleep(idle)
	}
}

// direct is the first message of a stream that fits, or nil.
func (b *bus) direct(stream string, asked question) (*nats.Msg, error) {
	answer, err := b.ask("$JS.API.DIRECT.GET."+stream, asked, nil)
	if err != nil || answer.Header.Get("Nats-Sequence") == "" {
		return nil, err
	}
	return answer, nil
}

func sequenceOf(message *nats.Msg) (uint64, error) {
	return strconv.ParseUint(message.Header.Get("Nats-Sequence"), 10, 64)
}

// payload is what a message says: its own bytes or those of a blob, unpacked.
func (b *bus) payload(message *nats.Msg) ([]byte, error) {
	data := message.Data
	if digest := message.Header.Get("Of-Blob"); digest != "" {
		var err error
		if data, err = b.blob(digest); err != nil {
			return nil, err
		}
	}
	if message.Header.Get("Of-Encoding") == "zstd" {
		return b.zstd.DecodeAll(data, nil)
	}
	return data, nil
}

// blob is bytes of the object store of_blobs, by their sha256.
func (b *bus) blob(digest string) ([]byte, error) {
	name := base64.URLEncoding.EncodeToString([]byte(digest))
	meta, err := b.direct("OBJ_of_blobs", question{LastBySubject: "$O.of_blobs.M." + name})
	if err != nil {
		return nil, err
	}
	var info struct {
		NUID string `json:"nuid"`
	}
	if meta == nil {
		return nil, fmt.Errorf("blob %s is not in of_blobs", digest)
	}
	if err := json.Unmarshal(meta.Data, &info); err != nil {
		return nil, err
	}
	data, err := b.chunks("$O.of_blobs.C." + info.NUID)
	if err == nil && fmt.Sprintf("%x", sha256.Sum256(data)) != digest {
		err = fmt.Errorf("blob %s has other bytes", digest)
	}
	return data, err
}

// chunks are joined by their number: one that lies there twice counts once.
func (b *bus) chunks(subject string) ([]byte, error) {
	found := map[int][]byte{}
	for next := uint64(1); ; {
		chunk, err := b.direct("OBJ_of_blobs", question{Seq: next, NextBySubject: subject})
		if err != nil {
			return nil, err
		}
		if chunk == nil {
			break
		}
		number, err := strconv.Atoi(chunk.Header.Get("Of-Chunk"))
		if err != nil {
			number = len(found)
		}
		found[number] = chunk.Data
		if next, err = sequenceOf(chunk); err != nil {
			return nil, err
		}
		next++
	}
	numbers := make([]int, 0, len(found))
	for number := range found {
		numbers = append(numbers, number)
	}
	sort.Ints(numbers)
	var data []byte
	for _, number := range numbers {
		data = append(data, found[number]...)
	}
	return data, nil
}
