package io.github.headrace.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Generation, and what a caller needs around it.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class InferenceServiceGrpc {

  private InferenceServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "headrace.v1.InferenceService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.GenerateRequest,
      io.github.headrace.v1.GenerateResponse> getGenerateMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Generate",
      requestType = io.github.headrace.v1.GenerateRequest.class,
      responseType = io.github.headrace.v1.GenerateResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.GenerateRequest,
      io.github.headrace.v1.GenerateResponse> getGenerateMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.GenerateRequest, io.github.headrace.v1.GenerateResponse> getGenerateMethod;
    if ((getGenerateMethod = InferenceServiceGrpc.getGenerateMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getGenerateMethod = InferenceServiceGrpc.getGenerateMethod) == null) {
          InferenceServiceGrpc.getGenerateMethod = getGenerateMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.GenerateRequest, io.github.headrace.v1.GenerateResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Generate"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GenerateRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GenerateResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Generate"))
              .build();
        }
      }
    }
    return getGenerateMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.CompleteRequest,
      io.github.headrace.v1.CompleteResponse> getCompleteMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Complete",
      requestType = io.github.headrace.v1.CompleteRequest.class,
      responseType = io.github.headrace.v1.CompleteResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.CompleteRequest,
      io.github.headrace.v1.CompleteResponse> getCompleteMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.CompleteRequest, io.github.headrace.v1.CompleteResponse> getCompleteMethod;
    if ((getCompleteMethod = InferenceServiceGrpc.getCompleteMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getCompleteMethod = InferenceServiceGrpc.getCompleteMethod) == null) {
          InferenceServiceGrpc.getCompleteMethod = getCompleteMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.CompleteRequest, io.github.headrace.v1.CompleteResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Complete"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.CompleteRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.CompleteResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Complete"))
              .build();
        }
      }
    }
    return getCompleteMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.ChatRequest,
      io.github.headrace.v1.ChatResponse> getChatMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Chat",
      requestType = io.github.headrace.v1.ChatRequest.class,
      responseType = io.github.headrace.v1.ChatResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.ChatRequest,
      io.github.headrace.v1.ChatResponse> getChatMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.ChatRequest, io.github.headrace.v1.ChatResponse> getChatMethod;
    if ((getChatMethod = InferenceServiceGrpc.getChatMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getChatMethod = InferenceServiceGrpc.getChatMethod) == null) {
          InferenceServiceGrpc.getChatMethod = getChatMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.ChatRequest, io.github.headrace.v1.ChatResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Chat"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ChatRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ChatResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Chat"))
              .build();
        }
      }
    }
    return getChatMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.SubmitRequest,
      io.github.headrace.v1.SubmitResponse> getSubmitMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Submit",
      requestType = io.github.headrace.v1.SubmitRequest.class,
      responseType = io.github.headrace.v1.SubmitResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.SubmitRequest,
      io.github.headrace.v1.SubmitResponse> getSubmitMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.SubmitRequest, io.github.headrace.v1.SubmitResponse> getSubmitMethod;
    if ((getSubmitMethod = InferenceServiceGrpc.getSubmitMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getSubmitMethod = InferenceServiceGrpc.getSubmitMethod) == null) {
          InferenceServiceGrpc.getSubmitMethod = getSubmitMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.SubmitRequest, io.github.headrace.v1.SubmitResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Submit"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SubmitRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SubmitResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Submit"))
              .build();
        }
      }
    }
    return getSubmitMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.SubscribeRequest,
      io.github.headrace.v1.SubscribeResponse> getSubscribeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Subscribe",
      requestType = io.github.headrace.v1.SubscribeRequest.class,
      responseType = io.github.headrace.v1.SubscribeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.SubscribeRequest,
      io.github.headrace.v1.SubscribeResponse> getSubscribeMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.SubscribeRequest, io.github.headrace.v1.SubscribeResponse> getSubscribeMethod;
    if ((getSubscribeMethod = InferenceServiceGrpc.getSubscribeMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getSubscribeMethod = InferenceServiceGrpc.getSubscribeMethod) == null) {
          InferenceServiceGrpc.getSubscribeMethod = getSubscribeMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.SubscribeRequest, io.github.headrace.v1.SubscribeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Subscribe"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SubscribeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SubscribeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Subscribe"))
              .build();
        }
      }
    }
    return getSubscribeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.SessionRequest,
      io.github.headrace.v1.SessionResponse> getSessionMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Session",
      requestType = io.github.headrace.v1.SessionRequest.class,
      responseType = io.github.headrace.v1.SessionResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.SessionRequest,
      io.github.headrace.v1.SessionResponse> getSessionMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.SessionRequest, io.github.headrace.v1.SessionResponse> getSessionMethod;
    if ((getSessionMethod = InferenceServiceGrpc.getSessionMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getSessionMethod = InferenceServiceGrpc.getSessionMethod) == null) {
          InferenceServiceGrpc.getSessionMethod = getSessionMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.SessionRequest, io.github.headrace.v1.SessionResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.BIDI_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Session"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SessionRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SessionResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Session"))
              .build();
        }
      }
    }
    return getSessionMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.CancelRequest,
      io.github.headrace.v1.CancelResponse> getCancelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Cancel",
      requestType = io.github.headrace.v1.CancelRequest.class,
      responseType = io.github.headrace.v1.CancelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.CancelRequest,
      io.github.headrace.v1.CancelResponse> getCancelMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.CancelRequest, io.github.headrace.v1.CancelResponse> getCancelMethod;
    if ((getCancelMethod = InferenceServiceGrpc.getCancelMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getCancelMethod = InferenceServiceGrpc.getCancelMethod) == null) {
          InferenceServiceGrpc.getCancelMethod = getCancelMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.CancelRequest, io.github.headrace.v1.CancelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Cancel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.CancelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.CancelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Cancel"))
              .build();
        }
      }
    }
    return getCancelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.ListRequestsRequest,
      io.github.headrace.v1.ListRequestsResponse> getListRequestsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListRequests",
      requestType = io.github.headrace.v1.ListRequestsRequest.class,
      responseType = io.github.headrace.v1.ListRequestsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.ListRequestsRequest,
      io.github.headrace.v1.ListRequestsResponse> getListRequestsMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.ListRequestsRequest, io.github.headrace.v1.ListRequestsResponse> getListRequestsMethod;
    if ((getListRequestsMethod = InferenceServiceGrpc.getListRequestsMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getListRequestsMethod = InferenceServiceGrpc.getListRequestsMethod) == null) {
          InferenceServiceGrpc.getListRequestsMethod = getListRequestsMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.ListRequestsRequest, io.github.headrace.v1.ListRequestsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListRequests"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListRequestsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListRequestsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("ListRequests"))
              .build();
        }
      }
    }
    return getListRequestsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.TokenizeRequest,
      io.github.headrace.v1.TokenizeResponse> getTokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Tokenize",
      requestType = io.github.headrace.v1.TokenizeRequest.class,
      responseType = io.github.headrace.v1.TokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.TokenizeRequest,
      io.github.headrace.v1.TokenizeResponse> getTokenizeMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.TokenizeRequest, io.github.headrace.v1.TokenizeResponse> getTokenizeMethod;
    if ((getTokenizeMethod = InferenceServiceGrpc.getTokenizeMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getTokenizeMethod = InferenceServiceGrpc.getTokenizeMethod) == null) {
          InferenceServiceGrpc.getTokenizeMethod = getTokenizeMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.TokenizeRequest, io.github.headrace.v1.TokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Tokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.TokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.TokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Tokenize"))
              .build();
        }
      }
    }
    return getTokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.DetokenizeRequest,
      io.github.headrace.v1.DetokenizeResponse> getDetokenizeMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Detokenize",
      requestType = io.github.headrace.v1.DetokenizeRequest.class,
      responseType = io.github.headrace.v1.DetokenizeResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.DetokenizeRequest,
      io.github.headrace.v1.DetokenizeResponse> getDetokenizeMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.DetokenizeRequest, io.github.headrace.v1.DetokenizeResponse> getDetokenizeMethod;
    if ((getDetokenizeMethod = InferenceServiceGrpc.getDetokenizeMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getDetokenizeMethod = InferenceServiceGrpc.getDetokenizeMethod) == null) {
          InferenceServiceGrpc.getDetokenizeMethod = getDetokenizeMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.DetokenizeRequest, io.github.headrace.v1.DetokenizeResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Detokenize"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.DetokenizeRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.DetokenizeResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("Detokenize"))
              .build();
        }
      }
    }
    return getDetokenizeMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.GetModelRequest,
      io.github.headrace.v1.GetModelResponse> getGetModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetModel",
      requestType = io.github.headrace.v1.GetModelRequest.class,
      responseType = io.github.headrace.v1.GetModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.GetModelRequest,
      io.github.headrace.v1.GetModelResponse> getGetModelMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.GetModelRequest, io.github.headrace.v1.GetModelResponse> getGetModelMethod;
    if ((getGetModelMethod = InferenceServiceGrpc.getGetModelMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getGetModelMethod = InferenceServiceGrpc.getGetModelMethod) == null) {
          InferenceServiceGrpc.getGetModelMethod = getGetModelMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.GetModelRequest, io.github.headrace.v1.GetModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("GetModel"))
              .build();
        }
      }
    }
    return getGetModelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.ListModelsRequest,
      io.github.headrace.v1.ListModelsResponse> getListModelsMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListModels",
      requestType = io.github.headrace.v1.ListModelsRequest.class,
      responseType = io.github.headrace.v1.ListModelsResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.ListModelsRequest,
      io.github.headrace.v1.ListModelsResponse> getListModelsMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.ListModelsRequest, io.github.headrace.v1.ListModelsResponse> getListModelsMethod;
    if ((getListModelsMethod = InferenceServiceGrpc.getListModelsMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getListModelsMethod = InferenceServiceGrpc.getListModelsMethod) == null) {
          InferenceServiceGrpc.getListModelsMethod = getListModelsMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.ListModelsRequest, io.github.headrace.v1.ListModelsResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListModels"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListModelsRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListModelsResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("ListModels"))
              .build();
        }
      }
    }
    return getListModelsMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.GetLoadRequest,
      io.github.headrace.v1.GetLoadResponse> getGetLoadMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetLoad",
      requestType = io.github.headrace.v1.GetLoadRequest.class,
      responseType = io.github.headrace.v1.GetLoadResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.GetLoadRequest,
      io.github.headrace.v1.GetLoadResponse> getGetLoadMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.GetLoadRequest, io.github.headrace.v1.GetLoadResponse> getGetLoadMethod;
    if ((getGetLoadMethod = InferenceServiceGrpc.getGetLoadMethod) == null) {
      synchronized (InferenceServiceGrpc.class) {
        if ((getGetLoadMethod = InferenceServiceGrpc.getGetLoadMethod) == null) {
          InferenceServiceGrpc.getGetLoadMethod = getGetLoadMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.GetLoadRequest, io.github.headrace.v1.GetLoadResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetLoad"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetLoadRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetLoadResponse.getDefaultInstance()))
              .setSchemaDescriptor(new InferenceServiceMethodDescriptorSupplier("GetLoad"))
              .build();
        }
      }
    }
    return getGetLoadMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static InferenceServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceStub>() {
        @java.lang.Override
        public InferenceServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceStub(channel, callOptions);
        }
      };
    return InferenceServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static InferenceServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingV2Stub>() {
        @java.lang.Override
        public InferenceServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return InferenceServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static InferenceServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceBlockingStub>() {
        @java.lang.Override
        public InferenceServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceBlockingStub(channel, callOptions);
        }
      };
    return InferenceServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static InferenceServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<InferenceServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<InferenceServiceFutureStub>() {
        @java.lang.Override
        public InferenceServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new InferenceServiceFutureStub(channel, callOptions);
        }
      };
    return InferenceServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Streams the answer to a prompt. Dropping the call cancels the generation.
     * </pre>
     */
    default void generate(io.github.headrace.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GenerateResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGenerateMethod(), responseObserver);
    }

    /**
     * <pre>
     * The same in one message, when the generation has ended.
     * </pre>
     */
    default void complete(io.github.headrace.v1.CompleteRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.CompleteResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getCompleteMethod(), responseObserver);
    }

    /**
     * <pre>
     * Streams the answer to a conversation, laid out by the model's own chat template.
     * </pre>
     */
    default void chat(io.github.headrace.v1.ChatRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ChatResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getChatMethod(), responseObserver);
    }

    /**
     * <pre>
     * Starts a generation that outlives its readers. It ends by itself, by Cancel, or by its time limit.
     * </pre>
     */
    default void submit(io.github.headrace.v1.SubmitRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SubmitResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getSubmitMethod(), responseObserver);
    }

    /**
     * <pre>
     * Reads a submitted generation from any token on, while it runs and until its log expires. Any number of readers.
     * </pre>
     */
    default void subscribe(io.github.headrace.v1.SubscribeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SubscribeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getSubscribeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Many generations over one stream, for gateways: submit, attach and cancel by an id of the caller's choice, and one message back per
     * engine step with what is new in all of them. Closing the sending side lets what runs end; dropping the call cancels what was
     * submitted attached to it.
     * </pre>
     */
    default io.grpc.stub.StreamObserver<io.github.headrace.v1.SessionRequest> session(
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SessionResponse> responseObserver) {
      return io.grpc.stub.ServerCalls.asyncUnimplementedStreamingCall(getSessionMethod(), responseObserver);
    }

    /**
     * <pre>
     * Ends a generation of the caller's. Its readers get FINISH_REASON_CANCELLED.
     * </pre>
     */
    default void cancel(io.github.headrace.v1.CancelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.CancelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getCancelMethod(), responseObserver);
    }

    /**
     * <pre>
     * The caller's own generations: waiting, running, and ended ones whose log is still kept.
     * </pre>
     */
    default void listRequests(io.github.headrace.v1.ListRequestsRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRequestsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListRequestsMethod(), responseObserver);
    }

    /**
     * <pre>
     * Text to token ids.
     * </pre>
     */
    default void tokenize(io.github.headrace.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getTokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * Token ids to text.
     * </pre>
     */
    default void detokenize(io.github.headrace.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getDetokenizeMethod(), responseObserver);
    }

    /**
     * <pre>
     * What one model is and what it allows.
     * </pre>
     */
    default void getModel(io.github.headrace.v1.GetModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetModelMethod(), responseObserver);
    }

    /**
     * <pre>
     * The models of this server.
     * </pre>
     */
    default void listModels(io.github.headrace.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListModelsMethod(), responseObserver);
    }

    /**
     * <pre>
     * How busy the server is, for load balancers and for people.
     * </pre>
     */
    default void getLoad(io.github.headrace.v1.GetLoadRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetLoadResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetLoadMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service InferenceService.
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public static abstract class InferenceServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return InferenceServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service InferenceService.
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public static final class InferenceServiceStub
      extends io.grpc.stub.AbstractAsyncStub<InferenceServiceStub> {
    private InferenceServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Streams the answer to a prompt. Dropping the call cancels the generation.
     * </pre>
     */
    public void generate(io.github.headrace.v1.GenerateRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GenerateResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getGenerateMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * The same in one message, when the generation has ended.
     * </pre>
     */
    public void complete(io.github.headrace.v1.CompleteRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.CompleteResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getCompleteMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Streams the answer to a conversation, laid out by the model's own chat template.
     * </pre>
     */
    public void chat(io.github.headrace.v1.ChatRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ChatResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getChatMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Starts a generation that outlives its readers. It ends by itself, by Cancel, or by its time limit.
     * </pre>
     */
    public void submit(io.github.headrace.v1.SubmitRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SubmitResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getSubmitMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Reads a submitted generation from any token on, while it runs and until its log expires. Any number of readers.
     * </pre>
     */
    public void subscribe(io.github.headrace.v1.SubscribeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SubscribeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getSubscribeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Many generations over one stream, for gateways: submit, attach and cancel by an id of the caller's choice, and one message back per
     * engine step with what is new in all of them. Closing the sending side lets what runs end; dropping the call cancels what was
     * submitted attached to it.
     * </pre>
     */
    public io.grpc.stub.StreamObserver<io.github.headrace.v1.SessionRequest> session(
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SessionResponse> responseObserver) {
      return io.grpc.stub.ClientCalls.asyncBidiStreamingCall(
          getChannel().newCall(getSessionMethod(), getCallOptions()), responseObserver);
    }

    /**
     * <pre>
     * Ends a generation of the caller's. Its readers get FINISH_REASON_CANCELLED.
     * </pre>
     */
    public void cancel(io.github.headrace.v1.CancelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.CancelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getCancelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * The caller's own generations: waiting, running, and ended ones whose log is still kept.
     * </pre>
     */
    public void listRequests(io.github.headrace.v1.ListRequestsRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRequestsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListRequestsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Text to token ids.
     * </pre>
     */
    public void tokenize(io.github.headrace.v1.TokenizeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.TokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Token ids to text.
     * </pre>
     */
    public void detokenize(io.github.headrace.v1.DetokenizeRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.DetokenizeResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * What one model is and what it allows.
     * </pre>
     */
    public void getModel(io.github.headrace.v1.GetModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetModelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * The models of this server.
     * </pre>
     */
    public void listModels(io.github.headrace.v1.ListModelsRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListModelsResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * How busy the server is, for load balancers and for people.
     * </pre>
     */
    public void getLoad(io.github.headrace.v1.GetLoadRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetLoadResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetLoadMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service InferenceService.
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public static final class InferenceServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<InferenceServiceBlockingV2Stub> {
    private InferenceServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Streams the answer to a prompt. Dropping the call cancels the generation.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, io.github.headrace.v1.GenerateResponse>
        generate(io.github.headrace.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getGenerateMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The same in one message, when the generation has ended.
     * </pre>
     */
    public io.github.headrace.v1.CompleteResponse complete(io.github.headrace.v1.CompleteRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getCompleteMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Streams the answer to a conversation, laid out by the model's own chat template.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, io.github.headrace.v1.ChatResponse>
        chat(io.github.headrace.v1.ChatRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getChatMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Starts a generation that outlives its readers. It ends by itself, by Cancel, or by its time limit.
     * </pre>
     */
    public io.github.headrace.v1.SubmitResponse submit(io.github.headrace.v1.SubmitRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getSubmitMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Reads a submitted generation from any token on, while it runs and until its log expires. Any number of readers.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, io.github.headrace.v1.SubscribeResponse>
        subscribe(io.github.headrace.v1.SubscribeRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getSubscribeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Many generations over one stream, for gateways: submit, attach and cancel by an id of the caller's choice, and one message back per
     * engine step with what is new in all of them. Closing the sending side lets what runs end; dropping the call cancels what was
     * submitted attached to it.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<io.github.headrace.v1.SessionRequest, io.github.headrace.v1.SessionResponse>
        session() {
      return io.grpc.stub.ClientCalls.blockingBidiStreamingCall(
          getChannel(), getSessionMethod(), getCallOptions());
    }

    /**
     * <pre>
     * Ends a generation of the caller's. Its readers get FINISH_REASON_CANCELLED.
     * </pre>
     */
    public io.github.headrace.v1.CancelResponse cancel(io.github.headrace.v1.CancelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getCancelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The caller's own generations: waiting, running, and ended ones whose log is still kept.
     * </pre>
     */
    public io.github.headrace.v1.ListRequestsResponse listRequests(io.github.headrace.v1.ListRequestsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getListRequestsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Text to token ids.
     * </pre>
     */
    public io.github.headrace.v1.TokenizeResponse tokenize(io.github.headrace.v1.TokenizeRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getTokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Token ids to text.
     * </pre>
     */
    public io.github.headrace.v1.DetokenizeResponse detokenize(io.github.headrace.v1.DetokenizeRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getDetokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * What one model is and what it allows.
     * </pre>
     */
    public io.github.headrace.v1.GetModelResponse getModel(io.github.headrace.v1.GetModelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The models of this server.
     * </pre>
     */
    public io.github.headrace.v1.ListModelsResponse listModels(io.github.headrace.v1.ListModelsRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getListModelsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How busy the server is, for load balancers and for people.
     * </pre>
     */
    public io.github.headrace.v1.GetLoadResponse getLoad(io.github.headrace.v1.GetLoadRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetLoadMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service InferenceService.
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public static final class InferenceServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<InferenceServiceBlockingStub> {
    private InferenceServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Streams the answer to a prompt. Dropping the call cancels the generation.
     * </pre>
     */
    public java.util.Iterator<io.github.headrace.v1.GenerateResponse> generate(
        io.github.headrace.v1.GenerateRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getGenerateMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The same in one message, when the generation has ended.
     * </pre>
     */
    public io.github.headrace.v1.CompleteResponse complete(io.github.headrace.v1.CompleteRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getCompleteMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Streams the answer to a conversation, laid out by the model's own chat template.
     * </pre>
     */
    public java.util.Iterator<io.github.headrace.v1.ChatResponse> chat(
        io.github.headrace.v1.ChatRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getChatMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Starts a generation that outlives its readers. It ends by itself, by Cancel, or by its time limit.
     * </pre>
     */
    public io.github.headrace.v1.SubmitResponse submit(io.github.headrace.v1.SubmitRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getSubmitMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Reads a submitted generation from any token on, while it runs and until its log expires. Any number of readers.
     * </pre>
     */
    public java.util.Iterator<io.github.headrace.v1.SubscribeResponse> subscribe(
        io.github.headrace.v1.SubscribeRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getSubscribeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Ends a generation of the caller's. Its readers get FINISH_REASON_CANCELLED.
     * </pre>
     */
    public io.github.headrace.v1.CancelResponse cancel(io.github.headrace.v1.CancelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getCancelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The caller's own generations: waiting, running, and ended ones whose log is still kept.
     * </pre>
     */
    public io.github.headrace.v1.ListRequestsResponse listRequests(io.github.headrace.v1.ListRequestsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListRequestsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Text to token ids.
     * </pre>
     */
    public io.github.headrace.v1.TokenizeResponse tokenize(io.github.headrace.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getTokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Token ids to text.
     * </pre>
     */
    public io.github.headrace.v1.DetokenizeResponse detokenize(io.github.headrace.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getDetokenizeMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * What one model is and what it allows.
     * </pre>
     */
    public io.github.headrace.v1.GetModelResponse getModel(io.github.headrace.v1.GetModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The models of this server.
     * </pre>
     */
    public io.github.headrace.v1.ListModelsResponse listModels(io.github.headrace.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListModelsMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How busy the server is, for load balancers and for people.
     * </pre>
     */
    public io.github.headrace.v1.GetLoadResponse getLoad(io.github.headrace.v1.GetLoadRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetLoadMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service InferenceService.
   * <pre>
   * Generation, and what a caller needs around it.
   * </pre>
   */
  public static final class InferenceServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<InferenceServiceFutureStub> {
    private InferenceServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected InferenceServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new InferenceServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * The same in one message, when the generation has ended.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.CompleteResponse> complete(
        io.github.headrace.v1.CompleteRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getCompleteMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Starts a generation that outlives its readers. It ends by itself, by Cancel, or by its time limit.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.SubmitResponse> submit(
        io.github.headrace.v1.SubmitRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getSubmitMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Ends a generation of the caller's. Its readers get FINISH_REASON_CANCELLED.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.CancelResponse> cancel(
        io.github.headrace.v1.CancelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getCancelMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * The caller's own generations: waiting, running, and ended ones whose log is still kept.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.ListRequestsResponse> listRequests(
        io.github.headrace.v1.ListRequestsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListRequestsMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Text to token ids.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.TokenizeResponse> tokenize(
        io.github.headrace.v1.TokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getTokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Token ids to text.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.DetokenizeResponse> detokenize(
        io.github.headrace.v1.DetokenizeRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getDetokenizeMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * What one model is and what it allows.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.GetModelResponse> getModel(
        io.github.headrace.v1.GetModelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetModelMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * The models of this server.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.ListModelsResponse> listModels(
        io.github.headrace.v1.ListModelsRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListModelsMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * How busy the server is, for load balancers and for people.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.GetLoadResponse> getLoad(
        io.github.headrace.v1.GetLoadRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetLoadMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_GENERATE = 0;
  private static final int METHODID_COMPLETE = 1;
  private static final int METHODID_CHAT = 2;
  private static final int METHODID_SUBMIT = 3;
  private static final int METHODID_SUBSCRIBE = 4;
  private static final int METHODID_CANCEL = 5;
  private static final int METHODID_LIST_REQUESTS = 6;
  private static final int METHODID_TOKENIZE = 7;
  private static final int METHODID_DETOKENIZE = 8;
  private static final int METHODID_GET_MODEL = 9;
  private static final int METHODID_LIST_MODELS = 10;
  private static final int METHODID_GET_LOAD = 11;
  private static final int METHODID_SESSION = 12;

  private static final class MethodHandlers<Req, Resp> implements
      io.grpc.stub.ServerCalls.UnaryMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ServerStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.ClientStreamingMethod<Req, Resp>,
      io.grpc.stub.ServerCalls.BidiStreamingMethod<Req, Resp> {
    private final AsyncService serviceImpl;
    private final int methodId;

    MethodHandlers(AsyncService serviceImpl, int methodId) {
      this.serviceImpl = serviceImpl;
      this.methodId = methodId;
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public void invoke(Req request, io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_GENERATE:
          serviceImpl.generate((io.github.headrace.v1.GenerateRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.GenerateResponse>) responseObserver);
          break;
        case METHODID_COMPLETE:
          serviceImpl.complete((io.github.headrace.v1.CompleteRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.CompleteResponse>) responseObserver);
          break;
        case METHODID_CHAT:
          serviceImpl.chat((io.github.headrace.v1.ChatRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.ChatResponse>) responseObserver);
          break;
        case METHODID_SUBMIT:
          serviceImpl.submit((io.github.headrace.v1.SubmitRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.SubmitResponse>) responseObserver);
          break;
        case METHODID_SUBSCRIBE:
          serviceImpl.subscribe((io.github.headrace.v1.SubscribeRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.SubscribeResponse>) responseObserver);
          break;
        case METHODID_CANCEL:
          serviceImpl.cancel((io.github.headrace.v1.CancelRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.CancelResponse>) responseObserver);
          break;
        case METHODID_LIST_REQUESTS:
          serviceImpl.listRequests((io.github.headrace.v1.ListRequestsRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRequestsResponse>) responseObserver);
          break;
        case METHODID_TOKENIZE:
          serviceImpl.tokenize((io.github.headrace.v1.TokenizeRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.TokenizeResponse>) responseObserver);
          break;
        case METHODID_DETOKENIZE:
          serviceImpl.detokenize((io.github.headrace.v1.DetokenizeRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.DetokenizeResponse>) responseObserver);
          break;
        case METHODID_GET_MODEL:
          serviceImpl.getModel((io.github.headrace.v1.GetModelRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.GetModelResponse>) responseObserver);
          break;
        case METHODID_LIST_MODELS:
          serviceImpl.listModels((io.github.headrace.v1.ListModelsRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.ListModelsResponse>) responseObserver);
          break;
        case METHODID_GET_LOAD:
          serviceImpl.getLoad((io.github.headrace.v1.GetLoadRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.GetLoadResponse>) responseObserver);
          break;
        default:
          throw new AssertionError();
      }
    }

    @java.lang.Override
    @java.lang.SuppressWarnings("unchecked")
    public io.grpc.stub.StreamObserver<Req> invoke(
        io.grpc.stub.StreamObserver<Resp> responseObserver) {
      switch (methodId) {
        case METHODID_SESSION:
          return (io.grpc.stub.StreamObserver<Req>) serviceImpl.session(
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.SessionResponse>) responseObserver);
        default:
          throw new AssertionError();
      }
    }
  }

  public static final io.grpc.ServerServiceDefinition bindService(AsyncService service) {
    return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
        .addMethod(
          getGenerateMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              io.github.headrace.v1.GenerateRequest,
              io.github.headrace.v1.GenerateResponse>(
                service, METHODID_GENERATE)))
        .addMethod(
          getCompleteMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.CompleteRequest,
              io.github.headrace.v1.CompleteResponse>(
                service, METHODID_COMPLETE)))
        .addMethod(
          getChatMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              io.github.headrace.v1.ChatRequest,
              io.github.headrace.v1.ChatResponse>(
                service, METHODID_CHAT)))
        .addMethod(
          getSubmitMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.SubmitRequest,
              io.github.headrace.v1.SubmitResponse>(
                service, METHODID_SUBMIT)))
        .addMethod(
          getSubscribeMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              io.github.headrace.v1.SubscribeRequest,
              io.github.headrace.v1.SubscribeResponse>(
                service, METHODID_SUBSCRIBE)))
        .addMethod(
          getSessionMethod(),
          io.grpc.stub.ServerCalls.asyncBidiStreamingCall(
            new MethodHandlers<
              io.github.headrace.v1.SessionRequest,
              io.github.headrace.v1.SessionResponse>(
                service, METHODID_SESSION)))
        .addMethod(
          getCancelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.CancelRequest,
              io.github.headrace.v1.CancelResponse>(
                service, METHODID_CANCEL)))
        .addMethod(
          getListRequestsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.ListRequestsRequest,
              io.github.headrace.v1.ListRequestsResponse>(
                service, METHODID_LIST_REQUESTS)))
        .addMethod(
          getTokenizeMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.TokenizeRequest,
              io.github.headrace.v1.TokenizeResponse>(
                service, METHODID_TOKENIZE)))
        .addMethod(
          getDetokenizeMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.DetokenizeRequest,
              io.github.headrace.v1.DetokenizeResponse>(
                service, METHODID_DETOKENIZE)))
        .addMethod(
          getGetModelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.GetModelRequest,
              io.github.headrace.v1.GetModelResponse>(
                service, METHODID_GET_MODEL)))
        .addMethod(
          getListModelsMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.ListModelsRequest,
              io.github.headrace.v1.ListModelsResponse>(
                service, METHODID_LIST_MODELS)))
        .addMethod(
          getGetLoadMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.GetLoadRequest,
              io.github.headrace.v1.GetLoadResponse>(
                service, METHODID_GET_LOAD)))
        .build();
  }

  private static abstract class InferenceServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    InferenceServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.github.headrace.v1.InferenceProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("InferenceService");
    }
  }

  private static final class InferenceServiceFileDescriptorSupplier
      extends InferenceServiceBaseDescriptorSupplier {
    InferenceServiceFileDescriptorSupplier() {}
  }

  private static final class InferenceServiceMethodDescriptorSupplier
      extends InferenceServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    InferenceServiceMethodDescriptorSupplier(java.lang.String methodName) {
      this.methodName = methodName;
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.MethodDescriptor getMethodDescriptor() {
      return getServiceDescriptor().findMethodByName(methodName);
    }
  }

  private static volatile io.grpc.ServiceDescriptor serviceDescriptor;

  public static io.grpc.ServiceDescriptor getServiceDescriptor() {
    io.grpc.ServiceDescriptor result = serviceDescriptor;
    if (result == null) {
      synchronized (InferenceServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new InferenceServiceFileDescriptorSupplier())
              .addMethod(getGenerateMethod())
              .addMethod(getCompleteMethod())
              .addMethod(getChatMethod())
              .addMethod(getSubmitMethod())
              .addMethod(getSubscribeMethod())
              .addMethod(getSessionMethod())
              .addMethod(getCancelMethod())
              .addMethod(getListRequestsMethod())
              .addMethod(getTokenizeMethod())
              .addMethod(getDetokenizeMethod())
              .addMethod(getGetModelMethod())
              .addMethod(getListModelsMethod())
              .addMethod(getGetLoadMethod())
              .build();
        }
      }
    }
    return result;
  }
}
