package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"io"
	mathrand "math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"example.com/client/unbroken"
)

const (
	failuresMax = 10 // So many attempts in a row may fail without an item.
	pause       = 100 * time.Millisecond
	pauseMax    = 5 * time.Second
)

// keptStream reads an answer that outlives its connection and its frontend: copy this file. The rules are those of
// "Coming back over gRPC" in docs/clients.md.
type keptStream struct {
	ctx      context.Context
	clients  []unbroken.InferenceClient
	request  *unbroken.GenerateRequest
	items    grpc.ServerStreamingClient[unbroken.GenerateResponse]
	cursor   string
	begun    bool
	complete bool
	index    int // Of the client of the current attempt.
	failures int
}

// generate starts a request, which gets a request id of its own. The first of several frontends is asked first. The
// deadline is that of the context.
func generate(ctx context.Context, clients []unbroken.InferenceClient, request *unbroken.GenerateRequest) *keptStream {
	id := make([]byte, 16)
	rand.Read(id) // Never fails.
	request.RequestId = hex.EncodeToString(id)
	return &keptStream{ctx: ctx, clients: clients, request: request}
}

// Recv returns the next item, each once, or io.EOF after the last one.
func (stream *keptStream) Recv() (*unbroken.GenerateResponse, error) {
	for {
		item, err := stream.receive()
		if err == nil {
			stream.failures, stream.complete = 0, item.GetCompleteFinal()
			if item.GetCursor() != "" {
				stream.cursor = item.GetCursor()
			}
			return item, nil
		}
		if err == io.EOF || stream.complete {
			return nil, io.EOF
		}
		if err := stream.lost(err); err != nil {
			return nil, err
		}
	}
}

// receive returns the next item of the current attempt, and begins one if there is none.
func (stream *keptStream) receive() (*unbroken.GenerateResponse, error) {
	if stream.items == nil {
		client := stream.clients[stream.index%len(stream.clients)]
		var err error
		if stream.begun {
			resume := &unbroken.ResumeRequest{GenerationId: stream.request.GetRequestId(), Cursor: stream.cursor}
			stream.items, err = client.Resume(stream.ctx, resume)
		} else {
			kept := metadata.AppendToOutgoingContext(stream.ctx, "x-on-disconnect", "continue")
			stream.items, err = client.Generate(kept, stream.request)
		}
		if err != nil {
			return nil, err
		}
	}
	return stream.items.Recv()
}

// lost prepares the next attempt after a failure, and pauses. It returns the failure if there is none.
func (stream *keptStream) lost(err error) error {
	unknown := stream.begun && stream.cursor == "" && status.Code(err) == codes.NotFound
	broken, wait := judge(err)
	if stream.failures == failuresMax || !broken && !unknown {
		return err
	}
	stream.failures++
	stream.items, stream.begun = nil, !unknown
	if unknown {
		return nil // No frontend has begun with it: ask this one anew.
	}
	stream.index++
	if more := stream.failures - len(stream.clients); more >= 0 {
		wait = max(wait, mathrand.N(min(pauseMax, pause<<more)))
		select {
		case <-time.After(wait):
		case <-stream.ctx.Done(): // The next attempt says so.
		}
	}
	return nil
}

// judge returns whether to come back after a failure, and how long to wait at least.
func judge(err error) (broken bool, wait time.Duration) {
	code := status.Code(err)
	broken = code != codes.DeadlineExceeded && code != codes.Canceled // Without ErrorInfo: the connection, or a proxy.
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			broken = detail.GetMetadata()["retryable"] == "true"
		case *errdetails.RetryInfo:
			wait = detail.GetRetryDelay().AsDuration()
		}
	}
	return broken, wait
}
