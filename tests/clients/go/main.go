// A gRPC client that needs nothing but the published proto file: `client HOST:PORT [HOST:PORT]`.
//
// To generate the stubs beside this file, run in the folder that contains proto/unbroken/v1/inference.proto, with the
// plugins that `go install tool` installs:
//
//	buf generate proto --path proto/unbroken/v1/inference.proto
//
// It prints a line of JSON for each step. With the addresses of two frontends, it only loses the first one: see resume.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"os"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"example.com/client/unbroken"
)

const (
	model         = "mocker"
	fullModel     = "full" // The only worker of this model runs one request at a time.
	tokens        = 120
	endless       = 100_000
	enough        = 5
	deadline      = 60 * time.Second
	shortDeadline = 2 * time.Second
)

// errIncomplete reports that the stream broke a rule of inference.proto, so what was received is not the answer.
var errIncomplete = errors.New("stream incomplete")

// errEnough stops reading a stream after enough tokens.
var errEnough = errors.New("enough")

type answer struct {
	tokenIDs     []uint32
	text         string
	finishReason string
}

func (got answer) fields() map[string]any {
	return map[string]any{"token_ids": got.tokenIDs, "text": got.text, "finish_reason": got.finishReason}
}

func main() {
	var clients []unbroken.InferenceClient
	for _, address := range os.Args[1:] {
		connection, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			log.Fatal(err)
		}
		defer connection.Close()
		clients = append(clients, unbroken.NewInferenceClient(connection))
	}
	if len(clients) > 1 {
		if err := lostFrontend(clients); err != nil {
			log.Fatal(err)
		}
		return
	}
	client := clients[0]
	for _, try := range []func(unbroken.InferenceClient) error{stream, cancel, refusal, deadlinePassed, lostWorker} {
		if err := try(client); err != nil {
			log.Fatal(err)
		}
	}
}

// buildRequest returns a request. The name becomes its request id, which the logs show.
func buildRequest(name, model string, maxTokens uint32) *unbroken.GenerateRequest {
	return &unbroken.GenerateRequest{
		Model:     model,
		Prompt:    &unbroken.GenerateRequest_Text{Text: "The moon"},
		Sampling:  &unbroken.Sampling{Temperature: proto.Float32(0.8), Seed: proto.Uint64(7)},
		Stop:      &unbroken.Stop{MaxTokens: proto.Uint32(maxTokens), IgnoreEos: true},
		RequestId: "go-" + name,
	}
}

type receiver interface {
	Recv() (*unbroken.GenerateResponse, error)
}

// read passes each delta of a stream with one choice to take, until take fails. It returns errIncomplete if the stream
// breaks a rule, or the stream's status as an error if that is not OK.
func read(responses receiver, take func(*unbroken.Delta) error) error {
	position, complete := 0, false
	for {
		response, err := responses.Recv()
		if err == io.EOF && complete {
			return nil
		}
		if err == io.EOF {
			return fmt.Errorf("%w: it was cut off", errIncomplete)
		}
		if err != nil {
			return err
		}
		delta := response.GetDelta()
		if complete || (delta == nil) != response.GetCompleteFinal() {
			return fmt.Errorf("%w: an item must be either a delta or the final marker", errIncomplete)
		}
		complete = response.GetCompleteFinal()
		if complete {
			continue
		}
		if len(delta.GetTokenIds()) > 0 && int(delta.GetPosition()) != position {
			return fmt.Errorf("%w: position %d follows %d", errIncomplete, delta.GetPosition(), position)
		}
		position += len(delta.GetTokenIds())
		if err := take(delta); err != nil {
			return err
		}
	}
}

// readAnswer requests an answer and reads it to its end. It calls begun once enough tokens have arrived.
func readAnswer(client unbroken.InferenceClient, request *unbroken.GenerateRequest, begun func()) (answer, error) {
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	responses, err := client.Generate(ctx, request)
	if err != nil {
		return answer{}, err
	}
	return readStream(responses, begun)
}

func readStream(responses receiver, begun func()) (answer, error) {
	var got answer
	err := read(responses, func(delta *unbroken.Delta) error {
		had := len(got.tokenIDs)
		got.tokenIDs = append(got.tokenIDs, delta.GetTokenIds()...)
		got.text += delta.GetText()
		if delta.GetFinishReason() != unbroken.FinishReason_FINISH_REASON_UNSPECIFIED {
			got.finishReason = delta.GetFinishReason().String()
		}
		if had < enough && len(got.tokenIDs) >= enough {
			begun()
		}
		return nil
	})
	return got, err
}

func stream(client unbroken.InferenceClient) error {
	got, err := readAnswer(client, buildRequest("stream", model, tokens), func() {})
	if err != nil {
		return err
	}
	return report("stream", got.fields())
}

// cancel cancels the rpc after some tokens. The worker stops within two steps.
func cancel(client unbroken.InferenceClient) error {
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	responses, err := client.Generate(ctx, buildRequest("cancel", model, endless))
	if err != nil {
		return err
	}
	count := 0
	err = read(responses, func(delta *unbroken.Delta) error {
		count += len(delta.GetTokenIds())
		if count >= enough {
			return errEnough
		}
		return nil
	})
	if !errors.Is(err, errEnough) {
		return err
	}
	stop()
	for err = nil; err == nil; { // Skips what arrived meanwhile; the status comes last.
		_, err = responses.Recv()
	}
	return report("cancel", map[string]any{"tokens": count, "status": name(err)})
}

// refusal sends a request while another stream holds the only slot. The refusal says why, and when to retry.
func refusal(client unbroken.InferenceClient) error {
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	holder, err := client.Generate(ctx, buildRequest("holder", fullModel, endless))
	if err != nil {
		return err
	}
	if _, err = holder.Recv(); err != nil {
		return err
	}
	_, err = readAnswer(client, buildRequest("refusal", fullModel, tokens), func() {})
	return report("refusal", details(err))
}

// details returns a status and its details: ErrorInfo, unless gRPC itself ended the rpc; RetryInfo if the server knows
// when to retry.
func details(err error) map[string]any {
	found := map[string]any{"status": name(err)}
	for _, detail := range status.Convert(err).Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			found["reason"], found["domain"], found["metadata"] = detail.GetReason(), detail.GetDomain(), detail.GetMetadata()
		case *errdetails.RetryInfo:
			found["retry_after_s"] = detail.GetRetryDelay().AsDuration().Seconds()
		}
	}
	return found
}

// deadlinePassed requests more tokens than the deadline allows.
func deadlinePassed(client unbroken.InferenceClient) error {
	ctx, stop := context.WithTimeout(context.Background(), shortDeadline)
	defer stop()
	responses, err := client.Generate(ctx, buildRequest("deadline", model, endless))
	if err != nil {
		return err
	}
	count := 0
	err = read(responses, func(delta *unbroken.Delta) error {
		count += len(delta.GetTokenIds())
		return nil
	})
	found := details(err)
	found["tokens"] = count
	return report("deadline", found)
}

// lostWorker loses its worker: the test that runs this program kills the worker when it reads `begun`. The client needs no
// code for that.
func lostWorker(client unbroken.InferenceClient) error {
	got, err := readAnswer(client, buildRequest("lost_worker", model, tokens), reportBegun)
	if err != nil {
		return err
	}
	return report("lost_worker", got.fields())
}

// lostFrontend loses its frontend: the test that runs this program kills the first one when it reads `begun`.
func lostFrontend(clients []unbroken.InferenceClient) error {
	ctx, stop := context.WithTimeout(context.Background(), deadline)
	defer stop()
	request := buildRequest("lost_frontend", model, tokens)
	undisturbed, err := readStream(generate(ctx, clients[1:], request), func() {})
	if err != nil {
		return err
	}
	resumed, err := readStream(generate(ctx, clients, request), reportBegun)
	if err != nil {
		return err
	}
	return errors.Join(report("undisturbed", undisturbed.fields()), report("resumed", resumed.fields()))
}

func reportBegun() {
	if err := report("begun", nil); err != nil {
		log.Fatal(err)
	}
}

// name returns a status code as gRPC spells it: RESOURCE_EXHAUSTED, not ResourceExhausted.
func name(err error) string {
	if status.Code(err) == codes.Canceled {
		return "CANCELLED"
	}
	var spelt strings.Builder
	for index, letter := range status.Code(err).String() {
		if index > 0 && letter >= 'A' && letter <= 'Z' {
			spelt.WriteByte('_')
		}
		spelt.WriteRune(letter)
	}
	return strings.ToUpper(spelt.String())
}

// report prints the result of a step.
func report(step string, fields map[string]any) error {
	line := map[string]any{"step": step}
	maps.Copy(line, fields)
	return json.NewEncoder(os.Stdout).Encode(line)
}
