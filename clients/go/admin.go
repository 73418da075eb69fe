// What an operator does to a running server. Callers need the permission "admin".

package headrace

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/headrace/headrace/clients/go/headracev1"
)

type (
	// RepositoryModel is a model of the server's repository folder, and where it is in its life.
	RepositoryModel = headracev1.RepositoryModel
	// ModelState is where a model of the repository is in its life.
	ModelState = headracev1.ModelState
	// TraceDetail is how much of a token's way is traced.
	TraceDetail = headracev1.TraceDetail
)

// The states of models.
const (
	ModelUnloaded  = headracev1.ModelState_MODEL_STATE_UNLOADED
	ModelLoading   = headracev1.ModelState_MODEL_STATE_LOADING
	ModelReady     = headracev1.ModelState_MODEL_STATE_READY
	ModelUnloading = headracev1.ModelState_MODEL_STATE_UNLOADING
	ModelFailed    = headracev1.ModelState_MODEL_STATE_FAILED
)

// The details of tracing.
const (
	TraceOff   = headracev1.TraceDetail_TRACE_DETAIL_OFF
	TraceArray = headracev1.TraceDetail_TRACE_DETAIL_ARRAY
	TraceSpan  = headracev1.TraceDetail_TRACE_DETAIL_SPAN
)

// Admin is the operator's side of a [Client]; it lives as long as that.
type Admin struct {
	client *Client
}

// Admin is the operator's side of the client.
func (c *Client) Admin() *Admin { return &Admin{c} }

// LoadModel starts serving a model of the repository folder and returns when it does; existing says
// that it did already. memoryBytes is what it may take of the device in all; 0 means what the
// server's settings give.
func (a *Admin) LoadModel(
	ctx context.Context, model string, memoryBytes uint64,
) (loaded *Model, existing bool, err error) {
	request := &headracev1.LoadModelRequest{Model: model, MemoryBytes: memoryBytes}
	response, err := unary(ctx, a.stub(), request, headracev1.AdminServiceClient.LoadModel)
	return response.GetModel(), response.GetExisting(), err
}

// UnloadModel takes a model away: no new generations, and open ones go on for the grace time, at
// most an hour. A negative grace means the server's default.
func (a *Admin) UnloadModel(ctx context.Context, model string, grace time.Duration) error {
	request := &headracev1.UnloadModelRequest{Model: model}
	if grace >= 0 {
		request.Grace = durationpb.New(grace)
	}
	_, err := unary(ctx, a.stub(), request, headracev1.AdminServiceClient.UnloadModel)
	return err
}

// ListRepository is the models of the repository folder and those served, by name.
func (a *Admin) ListRepository(ctx context.Context) ([]*RepositoryModel, error) {
	ctx, cancel := a.client.limited(ctx)
	defer cancel()
	response, err := unary(ctx, a.stub(), &headracev1.ListRepositoryRequest{},
		headracev1.AdminServiceClient.ListRepository)
	return response.GetModels(), err
}

// Drain takes no new generations on any model; what runs goes on. It returns how many sequences
// still run and how many requests wait.
func (a *Admin) Drain(ctx context.Context) (running, waiting uint32, err error) {
	return a.drain(ctx, &headracev1.DrainRequest{})
}

// Resume takes new generations again after [Admin.Drain].
func (a *Admin) Resume(ctx context.Context) error {
	_, _, err := a.drain(ctx, &headracev1.DrainRequest{Resume: true})
	return err
}

// SetTraceDetail sets how much of each token is traced from now on, for requests that do not say so
// themselves. [ErrFailedPrecondition] where telemetry is off.
func (a *Admin) SetTraceDetail(ctx context.Context, detail TraceDetail) error {
	ctx, cancel := a.client.limited(ctx)
	defer cancel()
	_, err := unary(ctx, a.stub(), &headracev1.SetTraceDetailRequest{Detail: detail},
		headracev1.AdminServiceClient.SetTraceDetail)
	return err
}

// GetMemoryPlan is how a model's memory is divided, nil while it loads; "" is the server's default
// model.
func (a *Admin) GetMemoryPlan(ctx context.Context, model string) (*MemoryPlan, error) {
	ctx, cancel := a.client.limited(ctx)
	defer cancel()
	response, err := unary(ctx, a.stub(), &headracev1.GetMemoryPlanRequest{Model: model},
		headracev1.AdminServiceClient.GetMemoryPlan)
	return response.GetPlan(), err
}

func (a *Admin) drain(ctx context.Context, request *headracev1.DrainRequest) (running, waiting uint32, err error) {
	ctx, cancel := a.client.limited(ctx)
	defer cancel()
	response, err := unary(ctx, a.stub(), request, headracev1.AdminServiceClient.Drain)
	return response.GetRunningSequences(), response.GetWaitingRequests(), err
}

func (a *Admin) stub() headracev1.AdminServiceClient {
	return headracev1.NewAdminServiceClient(a.client.channel())
}
