package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
)

const saveEvery = time.Second

// cursor is where a named reader was. Two that read under one name notice each other: the later one goes on.
type cursor struct {
	bus            *bus
	name, subjects string
	reader         string
	revision, at   uint64
	saved          time.Time
}

type mark struct {
	Stream   string `json:"stream"`
	Subjects string `json:"subjects"`
	Sequence uint64 `json:"sequence"`
	Reader   string `json:"reader"`
}

func (c *cursor) subject() string { return "$KV.of_cursors." + c.name }

// recall is the last sequence that was done, 0 if there is none.
func (c *cursor) recall() (uint64, error) {
	if c.name == "" {
		return 0, nil
	}
	id := make([]byte, 16)
	if _, err := rand.Read(id); err != nil {
		return 0, err
	}
	c.reader, c.saved = fmt.Sprintf("%x", id), time.Now()
	found, err := c.bus.direct("KV_of_cursors", question{LastBySubject: c.subject()})
	if err != nil || found == nil {
		return 0, err
	}
	if c.revision, err = sequenceOf(found); err != nil || len(found.Data) == 0 {
		return 0, err // forgotten
	}
	var there mark
	if err := json.Unmarshal(found.Data, &there); err != nil {
		return 0, err
	}
	if there.Subjects != c.subjects {
		return 0, fmt.Errorf("-name %s reads %s: choose another", c.name, there.Subjects)
	}
	c.at = there.Sequence
	return c.at, nil
}

// save keeps the place, at most once a second, unless now.
func (c *cursor) save(sequence uint64, now bool) error {
	if c.name == "" || sequence <= c.at || (!now && time.Since(c.saved) < saveEvery) {
		return nil
	}
	fence := nats.Header{"Nats-Expected-Last-Subject-Sequence": {strconv.FormatUint(c.revision, 10)}}
	answer, err := c.bus.ask(c.subject(), mark{stream, c.subjects, sequence, c.reader}, fence)
	if err != nil {
		return err
	}
	var stored struct {
		Seq   uint64 `json:"seq"`
		Error *struct {
			Description string `json:"description"`
		} `json:"error"`
	}
	if err := json.Unmarshal(answer.Data, &stored); err != nil {
		return err
	}
	if stored.Error != nil {
		return fmt.Errorf("-name %s is read by somebody else: %s", c.name, stored.Error.Description)
	}
	c.revision, c.at, c.saved = stored.Seq, sequence, time.Now()
	return nil
}
