import io.github.headrace.HeadraceClient;
import io.github.headrace.Load;
import io.github.headrace.Tls;
import io.github.headrace.UnauthenticatedException;
import java.nio.file.Path;

/**
 * An encrypted connection, with an API key. Arguments: server, file of the authority's certificate,
 * key.
 */
public class TlsWithKey {
    public static void main(String[] args) {
        String server = args.length > 0 ? args[0] : "127.0.0.1:50051";
        Tls tls = Tls.authorities(Path.of(args.length > 1 ? args[1] : "ca.pem"));
        String key = args.length > 2 ? args[2] : "the key that headrace keys printed";
        try (HeadraceClient client =
                HeadraceClient.builder(server).tls(tls).apiKey(key).build()) {
            Load load = client.load();
            System.out.println(load.model() + " is serving: " + load.serving());
        }
        try (HeadraceClient stranger = HeadraceClient.builder(server).tls(tls).build()) {
            stranger.load();
        } catch (UnauthenticatedException refused) {
            System.out.println("without a key: " + refused.getMessage());
        }
    }
}
