// The calls around generating: tokenizer, models, load. What the server says of itself is returned
// as the generated messages, which have no better shape in Go.

package headrace

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"github.com/headrace/headrace/clients/go/headracev1"
)

type (
	// Model is what one model is and what it allows.
	Model = headracev1.Model
	// MemoryPlan is how the memory of a device is divided.
	MemoryPlan = headracev1.MemoryPlan
	// Load is how busy the server is.
	Load = headracev1.GetLoadResponse
)

// TokenizeOptions say how text becomes tokens. The zero value is the server's default.
type TokenizeOptions struct {
	// Model whose tokenizer is used; "" means the server's default model.
	Model string
	// NoSpecialTokens leaves out what the tokenizer adds by itself, such as beginning-of-text.
	NoSpecialTokens bool
}

// Tokenize is text to token ids. options may be nil.
func (c *Client) Tokenize(ctx context.Context, text string, options *TokenizeOptions) ([]uint32, error) {
	request := &headracev1.TokenizeRequest{Text: text}
	if options != nil {
		request.Model, request.AddSpecialTokens = options.Model, unless(options.NoSpecialTokens)
	}
	response, err := quick(ctx, c, request, headracev1.InferenceServiceClient.Tokenize)
	return response.GetTokenIds(), err
}

// DetokenizeOptions say how tokens become text. The zero value is the server's default.
type DetokenizeOptions struct {
	// Model whose tokenizer is used; "" means the server's default model.
	Model string
	// KeepSpecialTokens leaves special tokens in the text.
	KeepSpecialTokens bool
}

// Detokenize is token ids to text. options may be nil.
func (c *Client) Detokenize(ctx context.Context, tokenIDs []uint32, options *DetokenizeOptions) (string, error) {
	request := &headracev1.DetokenizeRequest{TokenIds: tokenIDs}
	if options != nil {
		request.Model, request.SkipSpecialTokens = options.Model, unless(options.KeepSpecialTokens)
	}
	response, err := quick(ctx, c, request, headracev1.InferenceServiceClient.Detokenize)
	return response.GetText(), err
}

// GetModel is what one model is and what it allows; "" is the server's default model.
func (c *Client) GetModel(ctx context.Context, model string) (*Model, error) {
	response, err := quick(ctx, c, &headracev1.GetModelRequest{Model: model},
		headracev1.InferenceServiceClient.GetModel)
	return response.GetModel(), err
}

// ListModels is the models of the server, by name.
func (c *Client) ListModels(ctx context.Context) ([]*Model, error) {
	response, err := quick(ctx, c, &headracev1.ListModelsRequest{}, headracev1.InferenceServiceClient.ListModels)
	return response.GetModels(), err
}

// Load is how busy the server is with a model; "" is the server's default model.
func (c *Client) Load(ctx context.Context, model string) (*Load, error) {
	return quick(ctx, c, &headracev1.GetLoadRequest{Model: model}, headracev1.InferenceServiceClient.GetLoad)
}

// quick runs a call of InferenceService that does not wait for a generation; the answer is nil
// where there is an error.
func quick[Request proto.Message, Response any](
	ctx context.Context, c *Client, request Request,
	call func(headracev1.InferenceServiceClient, context.Context, Request, ...grpc.CallOption) (*Response, error),
) (*Response, error) {
	ctx, cancel := c.limited(ctx)
	defer cancel()
	return unary(ctx, c.inference(), request, call)
}

// unary runs a call with one answer, which is nil where there is an error.
func unary[Stub any, Request proto.Message, Response any](
	ctx context.Context, stub Stub, request Request,
	call func(Stub, context.Context, Request, ...grpc.CallOption) (*Response, error),
) (*Response, error) {
	if err := checkText(request); err != nil {
		return nil, err
	}
	response, err := call(stub, ctx, request)
	if err != nil {
		return nil, fromRPC(err, "")
	}
	return response, nil
}

// unless is an optional field whose default is true.
func unless(off bool) *bool {
	if !off {
		return nil
	}
	return proto.Bool(false)
}
