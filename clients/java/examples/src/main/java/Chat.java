import io.github.headrace.ChatMessage;
import io.github.headrace.GenerationOptions;
import io.github.headrace.GenerationStream;
import io.github.headrace.HeadraceClient;
import java.util.ArrayList;
import java.util.List;

/** A conversation of two turns. */
public class Chat {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        GenerationOptions options = GenerationOptions.builder().maxTokens(64).build();
        List<ChatMessage> said = new ArrayList<>();
        try (HeadraceClient client = HeadraceClient.builder(server).build()) {
            for (String question : List.of("What is a KV cache?", "Why does it help?")) {
                said.add(ChatMessage.user(question));
                try (GenerationStream answer = client.chat(said, options)) {
                    String text = answer.result().text();
                    System.out.println(question + " -> " + text);
                    said.add(ChatMessage.assistant(text));
                }
            }
        }
    }
}
