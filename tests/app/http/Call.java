import java.io.FileInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Path;

/** Posts a JSON file twice with the HTTP client of Java as it is, with a length and in chunks, and prints the answers. */
public class Call {
    public static void main(String[] arguments) throws Exception {
        var client = HttpClient.newHttpClient();
        var file = Path.of(arguments[1]);
        for (var body : new HttpRequest.BodyPublisher[] {
            BodyPublishers.ofFile(file), BodyPublishers.ofInputStream(() -> open(file))
        }) {
            var request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", "application/json").POST(body).build();
            System.out.println(client.send(request, BodyHandlers.ofString()).body());
        }
    }

    private static FileInputStream open(Path file) {
        try {
            return new FileInputStream(file.toFile());
        } catch (java.io.IOException error) {
            throw new java.io.UncheckedIOException(error);
        }
    }
}
