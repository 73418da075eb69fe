package io.github.headrace;

import java.net.InetAddress;
import java.net.UnknownHostException;
import java.util.regex.Pattern;

/** What the text of a gRPC target says about where it leads. Nothing is looked up. */
final class Target {
    private static final Pattern IPV4 = Pattern.compile("\\d{1,3}(\\.\\d{1,3}){3}");
    private static final Pattern PORT = Pattern.compile(":\\d+$");

    private Target() {}

    /**
     * Whether a target is this machine for certain: a Unix socket, localhost or a loopback address.
     * A name that happens to resolve to one today is not local.
     */
    static boolean isLocal(String target) {
        if (target.startsWith("unix:")) {
            return true;
        }
        String host = host(target.replaceFirst("^dns:(//[^/]*/)?", ""));
        return host.equalsIgnoreCase("localhost") || isLoopbackAddress(host);
    }

    /** The host of host, host:port, [v6] or [v6]:port. */
    private static String host(String address) {
        if (address.startsWith("[")) {
            int end = address.indexOf(']');
            return end < 0 ? address : address.substring(1, end);
        }
        return address.indexOf(':') == address.lastIndexOf(':')
                ? PORT.matcher(address).replaceFirst("")
                : address;
    }

    private static boolean isLoopbackAddress(String host) {
        // Java looks up what is no address, so only what can be nothing else is asked about.
        if (!IPV4.matcher(host).matches() && !host.contains(":")) {
            return false;
        }
        try {
            return InetAddress.getByName(host).isLoopbackAddress();
        } catch (UnknownHostException noAddress) {
            return false;
        }
    }
}
