package io.github.headrace;

import io.github.headrace.v1.CancelRequest;
import io.github.headrace.v1.CancelResponse;
import io.github.headrace.v1.ChatRequest;
import io.github.headrace.v1.ChatResponse;
import io.github.headrace.v1.CompleteRequest;
import io.github.headrace.v1.DetokenizeRequest;
import io.github.headrace.v1.DetokenizeResponse;
import io.github.headrace.v1.GenerateRequest;
import io.github.headrace.v1.GenerateResponse;
import io.github.headrace.v1.GenerationSpec;
import io.github.headrace.v1.GetLoadRequest;
import io.github.headrace.v1.GetModelRequest;
import io.github.headrace.v1.InferenceServiceGrpc;
import io.github.headrace.v1.ListModelsRequest;
import io.github.headrace.v1.ListRequestsRequest;
import io.github.headrace.v1.Part;
import io.github.headrace.v1.Role;
import io.github.headrace.v1.SubmitRequest;
import io.github.headrace.v1.SubscribeRequest;
import io.github.headrace.v1.SubscribeResponse;
import io.github.headrace.v1.TokenIds;
import io.github.headrace.v1.TokenizeRequest;
import io.github.headrace.v1.TokenizeResponse;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.UUID;

/**
 * Every call of the inference service as a value: which method, what to send, how to read the
 * answer.
 *
 * <p>Owns the pairing of requests with typed answers, so that blocking, async and Flow differ in
 * how they wait and in nothing else.
 */
final class Calls {
    private Calls() {}

    static StreamCall<?, ?> generate(Prompt prompt, GenerationOptions options) {
        return new StreamCall<>(
                InferenceServiceGrpc.getGenerateMethod(),
                GenerateRequest.newBuilder().setSpec(spec(prompt, options)).build(),
                GenerateResponse::getEvent);
    }

    static StreamCall<?, ?> chat(Conversation conversation, GenerationOptions options) {
        ChatRequest.Builder request = ChatRequest.newBuilder()
                .addAllMessages(messages(conversation))
                .setSpec(options.spec());
        if (conversation.continueLastMessage()) {
            request.setContinueLastMessage(true);
        }
        conversation.tools().ifPresent(use -> request.addAllTools(use.messages())
                .setToolChoice(use.choiceMessage())
                .setParallelToolCalls(use.parallel()));
        return new StreamCall<>(InferenceServiceGrpc.getChatMethod(), request.build(), ChatResponse::getEvent);
    }

    static StreamCall<SubscribeRequest, SubscribeResponse> subscribe(
            String requestId, int fromToken, Integer outputIndex) {
        SubscribeRequest.Builder request = SubscribeRequest.newBuilder()
                .setRequestId(Wire.utf8("request_id", requestId))
                .setFromToken(Wire.unsigned("from_token", fromToken));
        if (outputIndex != null) {
            request.setOutputIndex(Wire.unsigned("output_index", outputIndex));
        }
        return new StreamCall<>(
                InferenceServiceGrpc.getSubscribeMethod(), request.build(), SubscribeResponse::getEvent);
    }

    static UnaryCall<?, ?, Completion> complete(Prompt prompt, GenerationOptions options) {
        return new UnaryCall<>(
                InferenceServiceGrpc.getCompleteMethod(),
                CompleteRequest.newBuilder().setSpec(spec(prompt, options)).build(),
                Transcript::completion,
                true);
    }

    /**
     * Starts a generation that outlives its readers. Without a key of the caller's (null), one is
     * drawn: the call may then be sent again after a broken connection and still starts one
     * generation only.
     */
    static UnaryCall<?, ?, Submitted> submit(Prompt prompt, GenerationOptions options, String idempotencyKey) {
        boolean given = idempotencyKey != null && !idempotencyKey.isEmpty();
        String key = given ? idempotencyKey : UUID.randomUUID().toString();
        return UnaryCall.quick(
                InferenceServiceGrpc.getSubmitMethod(),
                SubmitRequest.newBuilder()
                        .setSpec(spec(prompt, options))
                        .setIdempotencyKey(Wire.utf8("idempotency_key", key))
                        .build(),
                Submitted::from);
    }

    static UnaryCall<?, ?, Boolean> cancel(String requestId) {
        return UnaryCall.quick(
                InferenceServiceGrpc.getCancelMethod(),
                CancelRequest.newBuilder()
                        .setRequestId(Wire.utf8("request_id", requestId))
                        .build(),
                CancelResponse::getCancelled);
    }

    static UnaryCall<?, ?, RequestPage> listRequests(RequestFilter filter, String pageToken) {
        ListRequestsRequest.Builder request =
                ListRequestsRequest.newBuilder().setPageToken(Wire.utf8("page_token", pageToken));
        if (filter.state() != null) {
            request.setState(filter.state().wire());
        }
        if (filter.model() != null) {
            request.setModel(Wire.utf8("model", filter.model()));
        }
        if (filter.pageSize() != null) {
            request.setPageSize(Wire.unsigned("page_size", filter.pageSize()));
        }
        return UnaryCall.quick(InferenceServiceGrpc.getListRequestsMethod(), request.build(), RequestPage::from);
    }

    static UnaryCall<?, ?, List<Integer>> tokenize(String text, boolean addSpecialTokens, String model) {
        return UnaryCall.quick(
                InferenceServiceGrpc.getTokenizeMethod(),
                TokenizeRequest.newBuilder()
                        .setText(Wire.utf8("text", text))
                        .setAddSpecialTokens(addSpecialTokens)
                        .setModel(Wire.utf8("model", model))
                        .build(),
                TokenizeResponse::getTokenIdsList);
    }

    static UnaryCall<?, ?, String> detokenize(Collection<Integer> ids, boolean skipSpecialTokens, String model) {
        DetokenizeRequest.Builder request = DetokenizeRequest.newBuilder()
                .setSkipSpecialTokens(skipSpecialTokens)
                .setModel(Wire.utf8("model", model));
        ids.forEach(id -> request.addTokenIds(Wire.unsigned("token_ids", id)));
        return UnaryCall.quick(
                InferenceServiceGrpc.getDetokenizeMethod(), request.build(), DetokenizeResponse::getText);
    }

    static UnaryCall<?, ?, Model> getModel(String model) {
        return UnaryCall.quick(
                InferenceServiceGrpc.getGetModelMethod(),
                GetModelRequest.newBuilder().setModel(Wire.utf8("model", model)).build(),
                response -> Model.from(response.getModel()));
    }

    static UnaryCall<?, ?, List<Model>> listModels() {
        return UnaryCall.quick(
                InferenceServiceGrpc.getListModelsMethod(),
                ListModelsRequest.getDefaultInstance(),
                response -> response.getModelsList().stream().map(Model::from).toList());
    }

    static UnaryCall<?, ?, Load> load(String model) {
        return UnaryCall.quick(
                InferenceServiceGrpc.getGetLoadMethod(),
                GetLoadRequest.newBuilder().setModel(Wire.utf8("model", model)).build(),
                Load::from);
    }

    /** The spec with its prompt. */
    static GenerationSpec spec(Prompt prompt, GenerationOptions options) {
        GenerationSpec.Builder spec = options.spec().toBuilder();
        if (prompt instanceof Prompt.Tokens tokens) {
            TokenIds.Builder ids = TokenIds.newBuilder();
            tokens.ids().forEach(id -> ids.addIds(Wire.unsigned("spec.token_ids.ids", id)));
            return spec.setTokenIds(ids).build();
        }
        return spec.setText(Wire.utf8("spec.text", ((Prompt.Text) prompt).text())).build();
    }

    /** The conversation as messages of the API. */
    static List<io.github.headrace.v1.ChatMessage> messages(Conversation conversation) {
        List<io.github.headrace.v1.ChatMessage> messages = new ArrayList<>();
        for (ChatMessage message : conversation.messages()) {
            messages.add(message(message, "messages[" + messages.size() + "]"));
        }
        return messages;
    }

    private static io.github.headrace.v1.ChatMessage message(ChatMessage message, String field) {
        io.github.headrace.v1.ChatMessage.Builder made = io.github.headrace.v1.ChatMessage.newBuilder()
                .setRole(role(message.role()))
                .setToolCallId(Wire.utf8(field + ".tool_call_id", message.toolCallId()));
        if (!message.reasoning().isEmpty()) {
            made.addParts(Part.newBuilder()
                    .setReasoning(Wire.utf8(field + ".parts[0].reasoning", message.reasoning())));
        }
        if (!message.text().isEmpty() || message.toolCalls().isEmpty()) {
            String part = field + ".parts[" + made.getPartsCount() + "].text";
            made.addParts(Part.newBuilder().setText(Wire.utf8(part, message.text())));
        }
        for (ToolCall call : message.toolCalls()) {
            String calls = field + ".tool_calls[" + made.getToolCallsCount() + "]";
            made.addToolCalls(io.github.headrace.v1.ToolCall.newBuilder()
                    .setId(Wire.utf8(calls + ".id", call.id()))
                    .setName(Wire.utf8(calls + ".name", call.name()))
                    .setArgumentsJson(Wire.utf8(calls + ".arguments_json", call.arguments())));
        }
        return made.build();
    }

    private static Role role(ChatMessage.Role role) {
        return switch (role) {
            case SYSTEM -> Role.ROLE_SYSTEM;
            case USER -> Role.ROLE_USER;
            case ASSISTANT -> Role.ROLE_ASSISTANT;
            case TOOL -> Role.ROLE_TOOL;
        };
    }
}
