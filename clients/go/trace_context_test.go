package headrace_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"

	headrace "github.com/headrace/headrace/clients/go"
	pb "github.com/headrace/headrace/clients/go/headracev1"
)

const traceparent = "00-aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-bbbbbbbbbbbbbbbb-01"

func traced(t *testing.T, ctx context.Context) context.Context {
	t.Helper()
	made, err := headrace.ContextWithTraceparent(ctx, traceparent)
	if err != nil {
		t.Fatal(err)
	}
	return made
}

func TestEveryCallThatGeneratesSendsItsContext(t *testing.T) {
	f := &fake{}
	client := start(t, f)
	// One that is there already is replaced, and others are kept.
	ctx := metadata.AppendToOutgoingContext(background, "traceparent", "00-old", "x-own", "kept")
	ctx = traced(t, ctx)
	read(t, client.Generate(ctx, headrace.Text("hello")))
	read(t, client.Chat(ctx, []headrace.Message{headrace.User("hello")}))
	if _, err := client.Complete(ctx, headrace.Text("hello")); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Submit(ctx, headrace.Text("hello")); err != nil {
		t.Fatal(err)
	}
	read(t, client.Generate(background, headrace.Text("hello")))
	if len(f.headers) != 5 {
		t.Fatal(len(f.headers))
	}
	for _, header := range f.headers[:4] {
		if !slices.Equal(header.Get("traceparent"), []string{traceparent}) ||
			!slices.Equal(header.Get("x-own"), []string{"kept"}) {
			t.Error(header)
		}
	}
	if sent := f.headers[4].Get("traceparent"); sent != nil {
		t.Error(sent)
	}
}

func TestAGenerationOfASessionHasItsOwnContext(t *testing.T) {
	f := &fake{}
	session := openSession(t, start(t, f))
	begun(session.Submit(headrace.Text("hello"), headrace.WithTraceparent(traceparent)))(t)
	begun(session.Submit(headrace.Text("hello")))(t)
	for _, malformed := range []string{"nonsense", ""} {
		_, err := session.Submit(headrace.Text("hello"), headrace.WithTraceparent(malformed))
		if !errors.Is(err, headrace.ErrInvalid) {
			t.Error(err)
		}
	}
	if err := session.CloseSend(); err != nil {
		t.Fatal(err)
	}
	for _, err := range session.Events() {
		if err != nil {
			t.Fatal(err)
		}
	}
	var sent []string
	for _, request := range f.requests {
		if request, is := request.(*pb.SessionRequest); is && request.GetSubmit() != nil {
			sent = append(sent, request.GetSubmit().GetTraceparent())
		}
	}
	if !slices.Equal(sent, []string{traceparent, ""}) {
		t.Error(sent)
	}
}

func TestAMalformedContextIsRefusedBeforeItIsSent(t *testing.T) {
	later := "cc" + traceparent[2:]
	for context, isOne := range map[string]bool{
		traceparent:                               true,
		later:                                     true,
		later + "-what-comes-later":               true,
		later + "-":                               true,
		later + "-" + strings.Repeat("x", 200):    true,
		later + "-" + strings.Repeat("x", 201):    false,
		later + "x":                               false,
		later + "-\x7f":                           false,
		traceparent + "-more":                     false,
		traceparent + "\n":                        false,
		"ff" + traceparent[2:]:                    false,
		strings.ReplaceAll(traceparent, "a", "0"): false,
		strings.ReplaceAll(traceparent, "b", "0"): false,
		strings.ToUpper(traceparent):              false,
		"nonsense":                                false,
		"":                                        false,
	} {
		_, err := headrace.ContextWithTraceparent(background, context)
		if (err == nil) != isOne || (err != nil && !errors.Is(err, headrace.ErrInvalid)) {
			t.Errorf("%q: %v", context, err)
		}
	}
}
