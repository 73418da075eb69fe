// Speaks the KServe wire by stubs generated from protos/inference alone: readiness, one inference,
// one generation as a stream.
package main

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/headrace/headrace/clients/go/inference"
)

func bytesTensor(text string) []byte {
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(text))), text...)
}

func infer(ctx context.Context, client inference.GRPCInferenceServiceClient) {
	request := &inference.ModelInferRequest{ModelName: "simple"}
	for _, name := range []string{"INPUT0", "INPUT1"} {
		raw := []byte{}
		for i := uint32(0); i < 16; i++ {
			raw = binary.LittleEndian.AppendUint32(raw, i)
		}
		request.Inputs = append(request.Inputs, &inference.ModelInferRequest_InferInputTensor{
			Name: name, Datatype: "INT32", Shape: []int64{1, 16},
		})
		request.RawInputContents = append(request.RawInputContents, raw)
	}
	response, err := client.ModelInfer(ctx, request)
	if err != nil {
		log.Fatal(err)
	}
	if sum := binary.LittleEndian.Uint32(response.RawOutputContents[0][60:]); sum != 30 {
		log.Fatalf("15 + 15 = %d", sum)
	}
}

func generate(ctx context.Context, client inference.GRPCInferenceServiceClient) string {
	stream, err := client.ModelStreamInfer(ctx)
	if err != nil {
		log.Fatal(err)
	}
	request := &inference.ModelInferRequest{ModelName: "vllm_model", Id: "1"}
	add := func(name, datatype string, raw []byte) {
		request.Inputs = append(request.Inputs, &inference.ModelInferRequest_InferInputTensor{
			Name: name, Datatype: datatype, Shape: []int64{1},
		})
		request.RawInputContents = append(request.RawInputContents, raw)
	}
	add("text_input", "BYTES", bytesTensor("The old sailor"))
	add("stream", "BOOL", []byte{1})
	add("sampling_parameters", "BYTES", bytesTensor(`{"max_tokens": 8, "temperature": 0}`))
	if err := stream.Send(request); err != nil {
		log.Fatal(err)
	}
	if err := stream.CloseSend(); err != nil {
		log.Fatal(err)
	}
	text, final := "", false
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			break
		}
		if err != nil || message.ErrorMessage != "" {
			log.Fatal(err, message.GetErrorMessage())
		}
		text += string(message.InferResponse.RawOutputContents[0][4:])
		final = message.InferResponse.Parameters["triton_final_response"].GetBoolParam()
	}
	if !final {
		log.Fatal("the last response does not say that it is")
	}
	return text
}

func main() {
	connection, err := grpc.NewClient(os.Args[1], grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := inference.NewGRPCInferenceServiceClient(connection)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	ready, err := client.ModelReady(ctx, &inference.ModelReadyRequest{Name: "vllm_model"})
	if err != nil || !ready.Ready {
		log.Fatal("not ready: ", err)
	}
	infer(ctx, client)
	fmt.Printf("PASS: %q\n", generate(ctx, client))
}
