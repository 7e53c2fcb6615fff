module openforge-go-consumer

go 1.19

require (
	github.com/nats-io/nats.go v1.22.1
	github.com/nats-io/nkeys v0.3.0
	github.com/klauspost/compress v1.15.12
	github.com/vmihailenco/msgpack/v5 v5.3.5
)
