import io.github.headrace.ChatMessage;
import io.github.headrace.Completion;
import io.github.headrace.Conversation;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;
import io.github.headrace.Tool;
import io.github.headrace.ToolCall;
import io.github.headrace.ToolUse;
import java.util.ArrayList;
import java.util.List;

/** A question that the model answers with a function. */
public class Tools {
    private static final Tool WEATHER = new Tool("weather", "The weather of a city.", """
            {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}},
             "required": ["city"], "additionalProperties": false}""");

    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options = GenerationOptions.builder().maxTokens(64).build();
        List<ChatMessage> said = new ArrayList<>(List.of(ChatMessage.user("What is the weather in Paris?")));
        String choice = "required";
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            while (true) {
                ToolUse use = new ToolUse(List.of(WEATHER), choice, false);
                try (GenerationStream stream = client.chat(Conversation.of(said).with(use), options)) {
                    Completion answer = stream.result();
                    said.add(answer.message());
                    if (answer.toolCalls().isEmpty()) {
                        System.out.println(answer.text());
                        return;
                    }
                    for (ToolCall call : answer.toolCalls()) {
                        System.out.println(call.name() + "(" + call.arguments() + ")");
                        said.add(ChatMessage.toolResult(call, "Sunny."));
                    }
                }
                choice = "none";
            }
        }
    }
}
