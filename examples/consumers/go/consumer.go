// Prints every trajectory as one line of JSON, and goes on where it was when it is started again.
//
//	consumer [-run RUN] [-env ENV] [-name NAME] [-since ISO-TIME] [-once]
//
// OPENFORGE_NATS_URL says where the bus is, OPENFORGE_NATS_NKEY_SEED_FILE holds a consumer's credentials, if it has any.
// Reading is one request for each fact ("the next one at or after this sequence on these subjects"): nothing is made on the
// server, nothing is acknowledged. With a name, the place is kept in the bucket of_cursors, as the Python client keeps it.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	stream = "TRAJECTORY"
	idle   = 250 * time.Millisecond
)

type line struct {
	Subject  string         `json:"subject"`
	Sequence uint64         `json:"sequence"`
	Fact     map[string]any `json:"fact"`
}

func main() {
	log.SetFlags(0)
	run := flag.String("run", "*", "the run")
	env := flag.String("env", "*", "the environment")
	name := flag.String("name", "", "a name under which the place is kept")
	since := flag.String("since", "", "begin at this time (RFC 3339)")
	once := flag.Bool("once", false, "end when all that is there now was read")
	flag.Parse()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)

	bus, err := open()
	if err != nil {
		log.Fatal(err)
	}
	defer bus.connection.Close()
	subjects := fmt.Sprintf("of.%s.trajectory.%s.*.>", *run, *env)
	if err := read(bus, subjects, *name, *since, *once, stop); err != nil {
		log.Fatal(err)
	}
}

// read goes on from the name's place until it is stopped, or, once, until there is nothing more now.
func read(bus *bus, subjects, name, since string, once bool, stop <-chan os.Signal) error {
	cursor := &cursor{bus: bus, name: name, subjects: subjects}
	done, err := cursor.recall()
	if err != nil {
		return err
	}
	question := question{Seq: done + 1, NextBySubject: subjects}
	if done == 0 && since != "" {
		question.Seq, question.StartTime = 0, since
	}
	out := json.NewEncoder(os.Stdout)
	out.SetEscapeHTML(false)
	for !stopped(stop) {
		message, err := bus.direct(stream, question)
		switch {
		case err != nil:
			return err
		case message == nil && once:
			return cursor.save(done, true)
		case message == nil:
			if err := cursor.save(done, true); err != nil {
				return err
			}
			time.Sleep(idle)
		default:
			if done, err = tell(bus, out, message); err != nil {
				return err
			}
			question.Seq, question.StartTime = done+1, ""
			if err := cursor.save(done, false); err != nil {
				return err
			}
		}
	}
	return cursor.save(done, true)
}

// tell prints the trajectory of a message and returns its sequence.
func tell(bus *bus, out *json.Encoder, message *nats.Msg) (uint64, error) {
	sequence, err := sequenceOf(message)
	if err != nil {
		return 0, err
	}
	bytes, err := bus.payload(message)
	if err != nil {
		return 0, err
	}
	fact, err := trajectory(bytes)
	if err != nil {
		return 0, err
	}
	return sequence, out.Encode(line{message.Header.Get("Nats-Subject"), sequence, fact})
}

func stopped(stop <-chan os.Signal) bool {
	select {
	case <-stop:
		return true
	default:
		return false
	}
}
