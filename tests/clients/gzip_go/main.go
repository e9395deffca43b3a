// A client of gRPC's test service that compresses its requests: `client HOST:PORT`.
//
// It prints a line of JSON for each step, with the bytes of the largest message in each direction, and those on the wire.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/encoding/gzip"
	pb "google.golang.org/grpc/interop/grpc_testing"
	"google.golang.org/grpc/stats"
)

const (
	large    = 200_000
	small    = 9
	deadline = 60 * time.Second
)

// sizes remembers the largest message in each direction.
type sizes struct {
	Sent           int `json:"sent"`
	SentOnWire     int `json:"sent_on_wire"`
	Received       int `json:"received"`
	ReceivedOnWire int `json:"received_on_wire"`
}

func (seen *sizes) HandleRPC(_ context.Context, event stats.RPCStats) {
	switch event := event.(type) {
	case *stats.OutPayload:
		if event.Length >= seen.Sent {
			seen.Sent, seen.SentOnWire = event.Length, event.CompressedLength
		}
	case *stats.InPayload:
		if event.Length >= seen.Received {
			seen.Received, seen.ReceivedOnWire = event.Length, event.CompressedLength
		}
	}
}

func (*sizes) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }

func (*sizes) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (*sizes) HandleConn(context.Context, stats.ConnStats) {}

func main() {
	for _, step := range []struct {
		name    string
		call    func(context.Context, pb.TestServiceClient) error
		options []grpc.CallOption
	}{
		{"unary", unary, []grpc.CallOption{grpc.UseCompressor(gzip.Name)}},
		{"stream", stream, []grpc.CallOption{grpc.UseCompressor(gzip.Name)}},
		{"plain", unary, nil},
	} {
		if err := report(step.name, step.call, step.options); err != nil {
			log.Fatal(step.name, ": ", err)
		}
	}
}

// report runs a step on a connection of its own, and prints the sizes that it has seen.
func report(name string, call func(context.Context, pb.TestServiceClient) error, options []grpc.CallOption) error {
	seen := &sizes{}
	connection, err := grpc.NewClient(os.Args[1],
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(options...),
		grpc.WithStatsHandler(seen),
	)
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	if err := call(ctx, pb.NewTestServiceClient(connection)); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(struct {
		Step string `json:"step"`
		*sizes
	}{name, seen})
}

func unary(ctx context.Context, client pb.TestServiceClient) error {
	response, err := client.UnaryCall(ctx, &pb.SimpleRequest{ResponseSize: large, Payload: &pb.Payload{Body: make([]byte, large)}})
	if err != nil {
		return err
	}
	return checkSize(response.GetPayload(), large)
}

// stream reads messages of which some are compressed.
func stream(ctx context.Context, client pb.TestServiceClient) error {
	want := []int32{small, large, small}
	request := &pb.StreamingOutputCallRequest{Payload: &pb.Payload{Body: make([]byte, large)}}
	for _, size := range want {
		request.ResponseParameters = append(request.ResponseParameters, &pb.ResponseParameters{Size: size})
	}
	responses, err := client.StreamingOutputCall(ctx, request)
	if err != nil {
		return err
	}
	for _, size := range want {
		response, err := responses.Recv()
		if err != nil {
			return err
		}
		if err := checkSize(response.GetPayload(), int(size)); err != nil {
			return err
		}
	}
	if _, err := responses.Recv(); err != io.EOF {
		return fmt.Errorf("the stream goes on: %w", err)
	}
	return nil
}

func checkSize(payload *pb.Payload, want int) error {
	if got := len(payload.GetBody()); got != want {
		return fmt.Errorf("%d bytes instead of %d", got, want)
	}
	return nil
}
