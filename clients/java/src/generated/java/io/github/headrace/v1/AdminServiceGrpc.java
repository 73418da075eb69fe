package io.github.headrace.v1;

import static io.grpc.MethodDescriptor.generateFullMethodName;

/**
 * <pre>
 * Models, drain and memory of a running server.
 * </pre>
 */
@io.grpc.stub.annotations.GrpcGenerated
public final class AdminServiceGrpc {

  private AdminServiceGrpc() {}

  public static final java.lang.String SERVICE_NAME = "headrace.v1.AdminService";

  // Static method descriptors that strictly reflect the proto.
  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.LoadModelRequest,
      io.github.headrace.v1.LoadModelResponse> getLoadModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "LoadModel",
      requestType = io.github.headrace.v1.LoadModelRequest.class,
      responseType = io.github.headrace.v1.LoadModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.LoadModelRequest,
      io.github.headrace.v1.LoadModelResponse> getLoadModelMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.LoadModelRequest, io.github.headrace.v1.LoadModelResponse> getLoadModelMethod;
    if ((getLoadModelMethod = AdminServiceGrpc.getLoadModelMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getLoadModelMethod = AdminServiceGrpc.getLoadModelMethod) == null) {
          AdminServiceGrpc.getLoadModelMethod = getLoadModelMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.LoadModelRequest, io.github.headrace.v1.LoadModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "LoadModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.LoadModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.LoadModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("LoadModel"))
              .build();
        }
      }
    }
    return getLoadModelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.UnloadModelRequest,
      io.github.headrace.v1.UnloadModelResponse> getUnloadModelMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "UnloadModel",
      requestType = io.github.headrace.v1.UnloadModelRequest.class,
      responseType = io.github.headrace.v1.UnloadModelResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.UnloadModelRequest,
      io.github.headrace.v1.UnloadModelResponse> getUnloadModelMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.UnloadModelRequest, io.github.headrace.v1.UnloadModelResponse> getUnloadModelMethod;
    if ((getUnloadModelMethod = AdminServiceGrpc.getUnloadModelMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getUnloadModelMethod = AdminServiceGrpc.getUnloadModelMethod) == null) {
          AdminServiceGrpc.getUnloadModelMethod = getUnloadModelMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.UnloadModelRequest, io.github.headrace.v1.UnloadModelResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "UnloadModel"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.UnloadModelRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.UnloadModelResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("UnloadModel"))
              .build();
        }
      }
    }
    return getUnloadModelMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.ListRepositoryRequest,
      io.github.headrace.v1.ListRepositoryResponse> getListRepositoryMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "ListRepository",
      requestType = io.github.headrace.v1.ListRepositoryRequest.class,
      responseType = io.github.headrace.v1.ListRepositoryResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.ListRepositoryRequest,
      io.github.headrace.v1.ListRepositoryResponse> getListRepositoryMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.ListRepositoryRequest, io.github.headrace.v1.ListRepositoryResponse> getListRepositoryMethod;
    if ((getListRepositoryMethod = AdminServiceGrpc.getListRepositoryMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getListRepositoryMethod = AdminServiceGrpc.getListRepositoryMethod) == null) {
          AdminServiceGrpc.getListRepositoryMethod = getListRepositoryMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.ListRepositoryRequest, io.github.headrace.v1.ListRepositoryResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "ListRepository"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListRepositoryRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.ListRepositoryResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("ListRepository"))
              .build();
        }
      }
    }
    return getListRepositoryMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.DrainRequest,
      io.github.headrace.v1.DrainResponse> getDrainMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "Drain",
      requestType = io.github.headrace.v1.DrainRequest.class,
      responseType = io.github.headrace.v1.DrainResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.DrainRequest,
      io.github.headrace.v1.DrainResponse> getDrainMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.DrainRequest, io.github.headrace.v1.DrainResponse> getDrainMethod;
    if ((getDrainMethod = AdminServiceGrpc.getDrainMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getDrainMethod = AdminServiceGrpc.getDrainMethod) == null) {
          AdminServiceGrpc.getDrainMethod = getDrainMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.DrainRequest, io.github.headrace.v1.DrainResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "Drain"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.DrainRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.DrainResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("Drain"))
              .build();
        }
      }
    }
    return getDrainMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.SetTraceDetailRequest,
      io.github.headrace.v1.SetTraceDetailResponse> getSetTraceDetailMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "SetTraceDetail",
      requestType = io.github.headrace.v1.SetTraceDetailRequest.class,
      responseType = io.github.headrace.v1.SetTraceDetailResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.SetTraceDetailRequest,
      io.github.headrace.v1.SetTraceDetailResponse> getSetTraceDetailMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.SetTraceDetailRequest, io.github.headrace.v1.SetTraceDetailResponse> getSetTraceDetailMethod;
    if ((getSetTraceDetailMethod = AdminServiceGrpc.getSetTraceDetailMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getSetTraceDetailMethod = AdminServiceGrpc.getSetTraceDetailMethod) == null) {
          AdminServiceGrpc.getSetTraceDetailMethod = getSetTraceDetailMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.SetTraceDetailRequest, io.github.headrace.v1.SetTraceDetailResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "SetTraceDetail"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SetTraceDetailRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.SetTraceDetailResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("SetTraceDetail"))
              .build();
        }
      }
    }
    return getSetTraceDetailMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.GetTraceRequest,
      io.github.headrace.v1.GetTraceResponse> getGetTraceMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetTrace",
      requestType = io.github.headrace.v1.GetTraceRequest.class,
      responseType = io.github.headrace.v1.GetTraceResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.GetTraceRequest,
      io.github.headrace.v1.GetTraceResponse> getGetTraceMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.GetTraceRequest, io.github.headrace.v1.GetTraceResponse> getGetTraceMethod;
    if ((getGetTraceMethod = AdminServiceGrpc.getGetTraceMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getGetTraceMethod = AdminServiceGrpc.getGetTraceMethod) == null) {
          AdminServiceGrpc.getGetTraceMethod = getGetTraceMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.GetTraceRequest, io.github.headrace.v1.GetTraceResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.SERVER_STREAMING)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetTrace"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetTraceRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetTraceResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("GetTrace"))
              .build();
        }
      }
    }
    return getGetTraceMethod;
  }

  private static volatile io.grpc.MethodDescriptor<io.github.headrace.v1.GetMemoryPlanRequest,
      io.github.headrace.v1.GetMemoryPlanResponse> getGetMemoryPlanMethod;

  @io.grpc.stub.annotations.RpcMethod(
      fullMethodName = SERVICE_NAME + '/' + "GetMemoryPlan",
      requestType = io.github.headrace.v1.GetMemoryPlanRequest.class,
      responseType = io.github.headrace.v1.GetMemoryPlanResponse.class,
      methodType = io.grpc.MethodDescriptor.MethodType.UNARY)
  public static io.grpc.MethodDescriptor<io.github.headrace.v1.GetMemoryPlanRequest,
      io.github.headrace.v1.GetMemoryPlanResponse> getGetMemoryPlanMethod() {
    io.grpc.MethodDescriptor<io.github.headrace.v1.GetMemoryPlanRequest, io.github.headrace.v1.GetMemoryPlanResponse> getGetMemoryPlanMethod;
    if ((getGetMemoryPlanMethod = AdminServiceGrpc.getGetMemoryPlanMethod) == null) {
      synchronized (AdminServiceGrpc.class) {
        if ((getGetMemoryPlanMethod = AdminServiceGrpc.getGetMemoryPlanMethod) == null) {
          AdminServiceGrpc.getGetMemoryPlanMethod = getGetMemoryPlanMethod =
              io.grpc.MethodDescriptor.<io.github.headrace.v1.GetMemoryPlanRequest, io.github.headrace.v1.GetMemoryPlanResponse>newBuilder()
              .setType(io.grpc.MethodDescriptor.MethodType.UNARY)
              .setFullMethodName(generateFullMethodName(SERVICE_NAME, "GetMemoryPlan"))
              .setSampledToLocalTracing(true)
              .setRequestMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetMemoryPlanRequest.getDefaultInstance()))
              .setResponseMarshaller(io.grpc.protobuf.ProtoUtils.marshaller(
                  io.github.headrace.v1.GetMemoryPlanResponse.getDefaultInstance()))
              .setSchemaDescriptor(new AdminServiceMethodDescriptorSupplier("GetMemoryPlan"))
              .build();
        }
      }
    }
    return getGetMemoryPlanMethod;
  }

  /**
   * Creates a new async stub that supports all call types for the service
   */
  public static AdminServiceStub newStub(io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceStub>() {
        @java.lang.Override
        public AdminServiceStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceStub(channel, callOptions);
        }
      };
    return AdminServiceStub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports all types of calls on the service
   */
  public static AdminServiceBlockingV2Stub newBlockingV2Stub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingV2Stub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingV2Stub>() {
        @java.lang.Override
        public AdminServiceBlockingV2Stub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceBlockingV2Stub(channel, callOptions);
        }
      };
    return AdminServiceBlockingV2Stub.newStub(factory, channel);
  }

  /**
   * Creates a new blocking-style stub that supports unary and streaming output calls on the service
   */
  public static AdminServiceBlockingStub newBlockingStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceBlockingStub>() {
        @java.lang.Override
        public AdminServiceBlockingStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceBlockingStub(channel, callOptions);
        }
      };
    return AdminServiceBlockingStub.newStub(factory, channel);
  }

  /**
   * Creates a new ListenableFuture-style stub that supports unary calls on the service
   */
  public static AdminServiceFutureStub newFutureStub(
      io.grpc.Channel channel) {
    io.grpc.stub.AbstractStub.StubFactory<AdminServiceFutureStub> factory =
      new io.grpc.stub.AbstractStub.StubFactory<AdminServiceFutureStub>() {
        @java.lang.Override
        public AdminServiceFutureStub newStub(io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
          return new AdminServiceFutureStub(channel, callOptions);
        }
      };
    return AdminServiceFutureStub.newStub(factory, channel);
  }

  /**
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public interface AsyncService {

    /**
     * <pre>
     * Starts a backend for a model of the repository folder and returns when it serves. A model that serves already is left as it is.
     * </pre>
     */
    default void loadModel(io.github.headrace.v1.LoadModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.LoadModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getLoadModelMethod(), responseObserver);
    }

    /**
     * <pre>
     * Takes a model away: no new generations, open ones go on for the grace time, then its backend ends and its memory is free.
     * </pre>
     */
    default void unloadModel(io.github.headrace.v1.UnloadModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.UnloadModelResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getUnloadModelMethod(), responseObserver);
    }

    /**
     * <pre>
     * The models of the repository folder and those served, with their states.
     * </pre>
     */
    default void listRepository(io.github.headrace.v1.ListRepositoryRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRepositoryResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getListRepositoryMethod(), responseObserver);
    }

    /**
     * <pre>
     * Takes no new generations on any model (health turns NOT_SERVING), or takes them again. What runs goes on.
     * </pre>
     */
    default void drain(io.github.headrace.v1.DrainRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.DrainResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getDrainMethod(), responseObserver);
    }

    /**
     * <pre>
     * How much of each token is traced, on all services and for requests that do not say so themselves. FAILED_PRECONDITION where telemetry is off.
     * </pre>
     */
    default void setTraceDetail(io.github.headrace.v1.SetTraceDetailRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SetTraceDetailResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getSetTraceDetailMethod(), responseObserver);
    }

    /**
     * <pre>
     * A recent trace, while the server remembers it (see the setting trace_ring). NOT_FOUND: unknown, not traced, or forgotten.
     * </pre>
     */
    default void getTrace(io.github.headrace.v1.GetTraceRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetTraceResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetTraceMethod(), responseObserver);
    }

    /**
     * <pre>
     * How a model's memory is divided.
     * </pre>
     */
    default void getMemoryPlan(io.github.headrace.v1.GetMemoryPlanRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetMemoryPlanResponse> responseObserver) {
      io.grpc.stub.ServerCalls.asyncUnimplementedUnaryCall(getGetMemoryPlanMethod(), responseObserver);
    }
  }

  /**
   * Base class for the server implementation of the service AdminService.
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public static abstract class AdminServiceImplBase
      implements io.grpc.BindableService, AsyncService {

    @java.lang.Override public final io.grpc.ServerServiceDefinition bindService() {
      return AdminServiceGrpc.bindService(this);
    }
  }

  /**
   * A stub to allow clients to do asynchronous rpc calls to service AdminService.
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public static final class AdminServiceStub
      extends io.grpc.stub.AbstractAsyncStub<AdminServiceStub> {
    private AdminServiceStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceStub(channel, callOptions);
    }

    /**
     * <pre>
     * Starts a backend for a model of the repository folder and returns when it serves. A model that serves already is left as it is.
     * </pre>
     */
    public void loadModel(io.github.headrace.v1.LoadModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.LoadModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getLoadModelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Takes a model away: no new generations, open ones go on for the grace time, then its backend ends and its memory is free.
     * </pre>
     */
    public void unloadModel(io.github.headrace.v1.UnloadModelRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.UnloadModelResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getUnloadModelMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * The models of the repository folder and those served, with their states.
     * </pre>
     */
    public void listRepository(io.github.headrace.v1.ListRepositoryRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRepositoryResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getListRepositoryMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * Takes no new generations on any model (health turns NOT_SERVING), or takes them again. What runs goes on.
     * </pre>
     */
    public void drain(io.github.headrace.v1.DrainRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.DrainResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getDrainMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * How much of each token is traced, on all services and for requests that do not say so themselves. FAILED_PRECONDITION where telemetry is off.
     * </pre>
     */
    public void setTraceDetail(io.github.headrace.v1.SetTraceDetailRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.SetTraceDetailResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getSetTraceDetailMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * A recent trace, while the server remembers it (see the setting trace_ring). NOT_FOUND: unknown, not traced, or forgotten.
     * </pre>
     */
    public void getTrace(io.github.headrace.v1.GetTraceRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetTraceResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncServerStreamingCall(
          getChannel().newCall(getGetTraceMethod(), getCallOptions()), request, responseObserver);
    }

    /**
     * <pre>
     * How a model's memory is divided.
     * </pre>
     */
    public void getMemoryPlan(io.github.headrace.v1.GetMemoryPlanRequest request,
        io.grpc.stub.StreamObserver<io.github.headrace.v1.GetMemoryPlanResponse> responseObserver) {
      io.grpc.stub.ClientCalls.asyncUnaryCall(
          getChannel().newCall(getGetMemoryPlanMethod(), getCallOptions()), request, responseObserver);
    }
  }

  /**
   * A stub to allow clients to do synchronous rpc calls to service AdminService.
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public static final class AdminServiceBlockingV2Stub
      extends io.grpc.stub.AbstractBlockingStub<AdminServiceBlockingV2Stub> {
    private AdminServiceBlockingV2Stub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceBlockingV2Stub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceBlockingV2Stub(channel, callOptions);
    }

    /**
     * <pre>
     * Starts a backend for a model of the repository folder and returns when it serves. A model that serves already is left as it is.
     * </pre>
     */
    public io.github.headrace.v1.LoadModelResponse loadModel(io.github.headrace.v1.LoadModelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getLoadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Takes a model away: no new generations, open ones go on for the grace time, then its backend ends and its memory is free.
     * </pre>
     */
    public io.github.headrace.v1.UnloadModelResponse unloadModel(io.github.headrace.v1.UnloadModelRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getUnloadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The models of the repository folder and those served, with their states.
     * </pre>
     */
    public io.github.headrace.v1.ListRepositoryResponse listRepository(io.github.headrace.v1.ListRepositoryRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getListRepositoryMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Takes no new generations on any model (health turns NOT_SERVING), or takes them again. What runs goes on.
     * </pre>
     */
    public io.github.headrace.v1.DrainResponse drain(io.github.headrace.v1.DrainRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getDrainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How much of each token is traced, on all services and for requests that do not say so themselves. FAILED_PRECONDITION where telemetry is off.
     * </pre>
     */
    public io.github.headrace.v1.SetTraceDetailResponse setTraceDetail(io.github.headrace.v1.SetTraceDetailRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getSetTraceDetailMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * A recent trace, while the server remembers it (see the setting trace_ring). NOT_FOUND: unknown, not traced, or forgotten.
     * </pre>
     */
    @io.grpc.ExperimentalApi("https://github.com/grpc/grpc-java/issues/10918")
    public io.grpc.stub.BlockingClientCall<?, io.github.headrace.v1.GetTraceResponse>
        getTrace(io.github.headrace.v1.GetTraceRequest request) {
      return io.grpc.stub.ClientCalls.blockingV2ServerStreamingCall(
          getChannel(), getGetTraceMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How a model's memory is divided.
     * </pre>
     */
    public io.github.headrace.v1.GetMemoryPlanResponse getMemoryPlan(io.github.headrace.v1.GetMemoryPlanRequest request) throws io.grpc.StatusException {
      return io.grpc.stub.ClientCalls.blockingV2UnaryCall(
          getChannel(), getGetMemoryPlanMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do limited synchronous rpc calls to service AdminService.
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public static final class AdminServiceBlockingStub
      extends io.grpc.stub.AbstractBlockingStub<AdminServiceBlockingStub> {
    private AdminServiceBlockingStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceBlockingStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceBlockingStub(channel, callOptions);
    }

    /**
     * <pre>
     * Starts a backend for a model of the repository folder and returns when it serves. A model that serves already is left as it is.
     * </pre>
     */
    public io.github.headrace.v1.LoadModelResponse loadModel(io.github.headrace.v1.LoadModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getLoadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Takes a model away: no new generations, open ones go on for the grace time, then its backend ends and its memory is free.
     * </pre>
     */
    public io.github.headrace.v1.UnloadModelResponse unloadModel(io.github.headrace.v1.UnloadModelRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getUnloadModelMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * The models of the repository folder and those served, with their states.
     * </pre>
     */
    public io.github.headrace.v1.ListRepositoryResponse listRepository(io.github.headrace.v1.ListRepositoryRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getListRepositoryMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * Takes no new generations on any model (health turns NOT_SERVING), or takes them again. What runs goes on.
     * </pre>
     */
    public io.github.headrace.v1.DrainResponse drain(io.github.headrace.v1.DrainRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getDrainMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How much of each token is traced, on all services and for requests that do not say so themselves. FAILED_PRECONDITION where telemetry is off.
     * </pre>
     */
    public io.github.headrace.v1.SetTraceDetailResponse setTraceDetail(io.github.headrace.v1.SetTraceDetailRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getSetTraceDetailMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * A recent trace, while the server remembers it (see the setting trace_ring). NOT_FOUND: unknown, not traced, or forgotten.
     * </pre>
     */
    public java.util.Iterator<io.github.headrace.v1.GetTraceResponse> getTrace(
        io.github.headrace.v1.GetTraceRequest request) {
      return io.grpc.stub.ClientCalls.blockingServerStreamingCall(
          getChannel(), getGetTraceMethod(), getCallOptions(), request);
    }

    /**
     * <pre>
     * How a model's memory is divided.
     * </pre>
     */
    public io.github.headrace.v1.GetMemoryPlanResponse getMemoryPlan(io.github.headrace.v1.GetMemoryPlanRequest request) {
      return io.grpc.stub.ClientCalls.blockingUnaryCall(
          getChannel(), getGetMemoryPlanMethod(), getCallOptions(), request);
    }
  }

  /**
   * A stub to allow clients to do ListenableFuture-style rpc calls to service AdminService.
   * <pre>
   * Models, drain and memory of a running server.
   * </pre>
   */
  public static final class AdminServiceFutureStub
      extends io.grpc.stub.AbstractFutureStub<AdminServiceFutureStub> {
    private AdminServiceFutureStub(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      super(channel, callOptions);
    }

    @java.lang.Override
    protected AdminServiceFutureStub build(
        io.grpc.Channel channel, io.grpc.CallOptions callOptions) {
      return new AdminServiceFutureStub(channel, callOptions);
    }

    /**
     * <pre>
     * Starts a backend for a model of the repository folder and returns when it serves. A model that serves already is left as it is.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.LoadModelResponse> loadModel(
        io.github.headrace.v1.LoadModelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getLoadModelMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Takes a model away: no new generations, open ones go on for the grace time, then its backend ends and its memory is free.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.UnloadModelResponse> unloadModel(
        io.github.headrace.v1.UnloadModelRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getUnloadModelMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * The models of the repository folder and those served, with their states.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.ListRepositoryResponse> listRepository(
        io.github.headrace.v1.ListRepositoryRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getListRepositoryMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * Takes no new generations on any model (health turns NOT_SERVING), or takes them again. What runs goes on.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.DrainResponse> drain(
        io.github.headrace.v1.DrainRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getDrainMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * How much of each token is traced, on all services and for requests that do not say so themselves. FAILED_PRECONDITION where telemetry is off.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.SetTraceDetailResponse> setTraceDetail(
        io.github.headrace.v1.SetTraceDetailRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getSetTraceDetailMethod(), getCallOptions()), request);
    }

    /**
     * <pre>
     * How a model's memory is divided.
     * </pre>
     */
    public com.google.common.util.concurrent.ListenableFuture<io.github.headrace.v1.GetMemoryPlanResponse> getMemoryPlan(
        io.github.headrace.v1.GetMemoryPlanRequest request) {
      return io.grpc.stub.ClientCalls.futureUnaryCall(
          getChannel().newCall(getGetMemoryPlanMethod(), getCallOptions()), request);
    }
  }

  private static final int METHODID_LOAD_MODEL = 0;
  private static final int METHODID_UNLOAD_MODEL = 1;
  private static final int METHODID_LIST_REPOSITORY = 2;
  private static final int METHODID_DRAIN = 3;
  private static final int METHODID_SET_TRACE_DETAIL = 4;
  private static final int METHODID_GET_TRACE = 5;
  private static final int METHODID_GET_MEMORY_PLAN = 6;

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
        case METHODID_LOAD_MODEL:
          serviceImpl.loadModel((io.github.headrace.v1.LoadModelRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.LoadModelResponse>) responseObserver);
          break;
        case METHODID_UNLOAD_MODEL:
          serviceImpl.unloadModel((io.github.headrace.v1.UnloadModelRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.UnloadModelResponse>) responseObserver);
          break;
        case METHODID_LIST_REPOSITORY:
          serviceImpl.listRepository((io.github.headrace.v1.ListRepositoryRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.ListRepositoryResponse>) responseObserver);
          break;
        case METHODID_DRAIN:
          serviceImpl.drain((io.github.headrace.v1.DrainRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.DrainResponse>) responseObserver);
          break;
        case METHODID_SET_TRACE_DETAIL:
          serviceImpl.setTraceDetail((io.github.headrace.v1.SetTraceDetailRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.SetTraceDetailResponse>) responseObserver);
          break;
        case METHODID_GET_TRACE:
          serviceImpl.getTrace((io.github.headrace.v1.GetTraceRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.GetTraceResponse>) responseObserver);
          break;
        case METHODID_GET_MEMORY_PLAN:
          serviceImpl.getMemoryPlan((io.github.headrace.v1.GetMemoryPlanRequest) request,
              (io.grpc.stub.StreamObserver<io.github.headrace.v1.GetMemoryPlanResponse>) responseObserver);
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
        default:
          throw new AssertionError();
      }
    }
  }

  public static final io.grpc.ServerServiceDefinition bindService(AsyncService service) {
    return io.grpc.ServerServiceDefinition.builder(getServiceDescriptor())
        .addMethod(
          getLoadModelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.LoadModelRequest,
              io.github.headrace.v1.LoadModelResponse>(
                service, METHODID_LOAD_MODEL)))
        .addMethod(
          getUnloadModelMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.UnloadModelRequest,
              io.github.headrace.v1.UnloadModelResponse>(
                service, METHODID_UNLOAD_MODEL)))
        .addMethod(
          getListRepositoryMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.ListRepositoryRequest,
              io.github.headrace.v1.ListRepositoryResponse>(
                service, METHODID_LIST_REPOSITORY)))
        .addMethod(
          getDrainMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.DrainRequest,
              io.github.headrace.v1.DrainResponse>(
                service, METHODID_DRAIN)))
        .addMethod(
          getSetTraceDetailMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.SetTraceDetailRequest,
              io.github.headrace.v1.SetTraceDetailResponse>(
                service, METHODID_SET_TRACE_DETAIL)))
        .addMethod(
          getGetTraceMethod(),
          io.grpc.stub.ServerCalls.asyncServerStreamingCall(
            new MethodHandlers<
              io.github.headrace.v1.GetTraceRequest,
              io.github.headrace.v1.GetTraceResponse>(
                service, METHODID_GET_TRACE)))
        .addMethod(
          getGetMemoryPlanMethod(),
          io.grpc.stub.ServerCalls.asyncUnaryCall(
            new MethodHandlers<
              io.github.headrace.v1.GetMemoryPlanRequest,
              io.github.headrace.v1.GetMemoryPlanResponse>(
                service, METHODID_GET_MEMORY_PLAN)))
        .build();
  }

  private static abstract class AdminServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoFileDescriptorSupplier, io.grpc.protobuf.ProtoServiceDescriptorSupplier {
    AdminServiceBaseDescriptorSupplier() {}

    @java.lang.Override
    public com.google.protobuf.Descriptors.FileDescriptor getFileDescriptor() {
      return io.github.headrace.v1.AdminProto.getDescriptor();
    }

    @java.lang.Override
    public com.google.protobuf.Descriptors.ServiceDescriptor getServiceDescriptor() {
      return getFileDescriptor().findServiceByName("AdminService");
    }
  }

  private static final class AdminServiceFileDescriptorSupplier
      extends AdminServiceBaseDescriptorSupplier {
    AdminServiceFileDescriptorSupplier() {}
  }

  private static final class AdminServiceMethodDescriptorSupplier
      extends AdminServiceBaseDescriptorSupplier
      implements io.grpc.protobuf.ProtoMethodDescriptorSupplier {
    private final java.lang.String methodName;

    AdminServiceMethodDescriptorSupplier(java.lang.String methodName) {
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
      synchronized (AdminServiceGrpc.class) {
        result = serviceDescriptor;
        if (result == null) {
          serviceDescriptor = result = io.grpc.ServiceDescriptor.newBuilder(SERVICE_NAME)
              .setSchemaDescriptor(new AdminServiceFileDescriptorSupplier())
              .addMethod(getLoadModelMethod())
              .addMethod(getUnloadModelMethod())
              .addMethod(getListRepositoryMethod())
              .addMethod(getDrainMethod())
              .addMethod(getSetTraceDetailMethod())
              .addMethod(getGetTraceMethod())
              .addMethod(getGetMemoryPlanMethod())
              .build();
        }
      }
    }
    return result;
  }
}
