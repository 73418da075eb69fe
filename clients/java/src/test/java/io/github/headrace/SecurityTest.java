package io.github.headrace;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.grpc.Status;
import java.nio.file.Path;
import java.time.Duration;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.condition.EnabledIfEnvironmentVariable;

/**
 * A server as others reach it: certificates on both sides, keys, permissions, quotas,
 * administration.
 */
@EnabledIfEnvironmentVariable(named = SecurityTest.VARIABLE, matches = ".+")
@Timeout(60)
class SecurityTest {
    static final String VARIABLE = "HEADRACE_TEST_SECURED";
    private static final String SERVER = System.getenv(VARIABLE);
    private static final Path CERTS = Path.of(System.getenv().getOrDefault("HEADRACE_TEST_CERTS", "."));
    private static final Tls TLS = Tls.authorities(CERTS.resolve("ca.pem"))
            .clientCertificate(CERTS.resolve("app.pem"), CERTS.resolve("app.key"));

    @Test
    void aKeyOverTlsIsServed() {
        try (HeadraceClient client = client(TLS, key("USER"))) {
            assertEquals(
                    4, client.complete("Once", TestServer.exactly(4).build()).tokenIds().size());
            assertTrue(client.async().load("").join().serving());
        }
    }

    @Test
    void whoHasNoKeyOrAWrongOneIsUnauthenticated() {
        try (HeadraceClient none = HeadraceClient.builder(SERVER).tls(TLS).build();
                HeadraceClient wrong = client(TLS, "hr-unknown");
                GenerationStream stream = wrong.generate("Once")) {
            assertThrows(UnauthenticatedException.class, none::load);
            assertThrows(PermissionDeniedException.class, wrong::load);
            assertThrows(UnauthenticatedException.class, stream::hasNext);
        }
    }

    @Test
    void theServerMustProveItsNameToTheRightAuthority() {
        try (HeadraceClient stranger = client(Tls.systemRoots(), key("USER"));
                HeadraceClient misnamed = client(TLS.serverName("somebody.else"), key("USER"));
                HeadraceClient named = client(TLS.serverName("localhost"), key("USER"))) {
            assertThrows(UnavailableException.class, stranger::load);
            assertThrows(UnavailableException.class, misnamed::load);
            assertTrue(named.load().serving());
        }
    }

    @Test
    void aServerThatAsksForCertificatesGetsOne() {
        try (HeadraceClient anonymous = client(Tls.authorities(CERTS.resolve("ca.pem")), key("USER"))) {
            assertThrows(UnavailableException.class, anonymous::load);
        }
    }

    @Test
    void aQuotaSaysWhenToComeBack() {
        try (HeadraceClient client = client(TLS, key("BOUNDED"))) {
            OverloadedException full = assertThrows(OverloadedException.class, () -> {
                for (int i = 0; i < 20; i++) {
                    client.complete("Once", TestServer.exactly(1).build());
                }
            });
            assertFalse(full.retryAfter().orElseThrow().isZero());
        }
    }

    @Test
    void administrationNeedsItsPermission() {
        try (HeadraceClient user = client(TLS, key("USER"));
                HeadraceClient operator = client(TLS, key("ADMIN"))) {
            assertThrows(PermissionDeniedException.class, () -> user.admin().memoryPlan(""));
            AdminClient admin = operator.admin();
            assertTrue(admin.memoryPlan("").orElseThrow().kvCacheBytes() > 0);
            assertEquals(
                    RepositoryModel.State.READY, admin.listRepository().get(0).state());
            try {
                admin.setTraceDetail(TraceDetail.ARRAY);
            } catch (HeadraceException refused) {
                // The server may run without telemetry.
                assertEquals(Status.Code.FAILED_PRECONDITION, refused.code());
            }
            assertThrows(HeadraceException.class, () -> admin.unloadModel("no-such-model", Duration.ZERO));
            assertThrows(HeadraceException.class, () -> admin.loadModel("no-such-model", 0));
            assertThrows(InvalidRequestException.class, () -> admin.loadModel("demo", -1));
            assertEquals(
                    admin.memoryPlan(""), operator.async().admin().memoryPlan("").join());
        }
    }

    private static HeadraceClient client(Tls tls, String key) {
        RetryPolicy once = RetryPolicy.NONE;
        return HeadraceClient.builder(SERVER).tls(tls).apiKey(key).retry(once).build();
    }

    private static String key(String whose) {
        return System.getenv("HEADRACE_TEST_KEY_" + whose);
    }
}
