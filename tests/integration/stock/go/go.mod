module penstock/stock

go 1.18

require (
	github.com/segmentio/kafka-go v0.4.47
	github.com/twmb/franz-go v1.15.4
)

require (
	github.com/klauspost/compress v1.16.7 // indirect
	github.com/pierrec/lz4/v4 v4.1.19 // indirect
	github.com/twmb/franz-go/pkg/kmsg v1.7.0 // indirect
)
