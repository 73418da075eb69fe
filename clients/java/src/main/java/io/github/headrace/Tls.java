package io.github.headrace;

import io.grpc.ChannelCredentials;
import io.grpc.TlsChannelCredentials;
import java.io.File;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;

/**
 * How a connection is encrypted, and who proves what to whom. Files are PEM and are read when the
 * client is built.
 */
public final class Tls {
    private final Path authorities;
    private final Path certificate;
    private final Path privateKey;
    private final String serverName;

    private Tls(Path authorities, Path certificate, Path privateKey, String serverName) {
        this.authorities = authorities;
        this.certificate = certificate;
        this.privateKey = privateKey;
        this.serverName = serverName;
    }

    /**
     * The server proves its name to the authorities that Java trusts.
     *
     * @return the settings
     */
    public static Tls systemRoots() {
        return new Tls(null, null, null, null);
    }

    /**
     * The server proves its name to authorities of one's own.
     *
     * @param file their certificates, PEM
     * @return the settings
     */
    public static Tls authorities(Path file) {
        return new Tls(file, null, null, null);
    }

    /**
     * These settings with the caller's own certificate, for servers that ask for one (mTLS).
     *
     * @param chain the certificate and its chain, PEM
     * @param key its private key, PKCS#8 PEM, not encrypted
     * @return other settings
     */
    public Tls clientCertificate(Path chain, Path key) {
        return new Tls(authorities, chain, key, serverName);
    }

    /**
     * These settings with the name that the server's certificate must be for. Default: the host of
     * the address.
     *
     * @param name a host name
     * @return other settings
     */
    public Tls serverName(String name) {
        return new Tls(authorities, certificate, privateKey, name);
    }

    /** The name that replaces the address's host, or null. */
    String serverName() {
        return serverName;
    }

    ChannelCredentials credentials() {
        TlsChannelCredentials.Builder credentials = TlsChannelCredentials.newBuilder();
        try {
            if (authorities != null) {
                credentials.trustManager(holding(authorities, "CERTIFICATE-----"));
            }
            if (certificate != null) {
                credentials.keyManager(readable(certificate), readable(privateKey));
            }
        } catch (IOException unreadable) {
            throw new IllegalArgumentException("cannot read a TLS file: " + unreadable.getMessage(), unreadable);
        }
        return credentials.build();
    }

    /** The file, if it has the text: with an empty one each handshake would fail. */
    private static File holding(Path file, String text) throws IOException {
        if (!Files.readString(readable(file).toPath(), StandardCharsets.ISO_8859_1).contains(text)) {
            throw new IOException(file + " holds no PEM certificate");
        }
        return file.toFile();
    }

    private static File readable(Path file) throws IOException {
        if (!Files.isRegularFile(file) || !Files.isReadable(file)) {
            throw new IOException(file + " does not exist, is no file or may not be read");
        }
        return file.toFile();
    }
}
