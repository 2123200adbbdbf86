//! nginx as a sidecar.

use std::{fmt::Write as _, path::Path};

use crate::node::Node;

/// Returns the module for TCP, which distributions package separately.
pub(super) fn stream_module() -> Option<&'static Path> {
    let folders =
        ["/usr/lib/nginx/modules/ngx_stream_module.so", "/usr/lib64/nginx/modules/ngx_stream_module.so"];
    folders.map(Path::new).into_iter().find(|path| path.is_file())
}

/// Returns the configuration file.
pub(super) fn configuration(node: &Node<'_>) -> String {
    let own = node.own();
    let (certificate, key) = (own.certificate.display(), own.key.display());
    let (root, folder) = (node.certificates.root.display(), node.folder.display());
    let side = node.role.name();
    let tls_in = if node.tls_in() {
        let tickets = if node.resumption { "on" } else { "off" };
        format!(
            "ssl_certificate {certificate}; ssl_certificate_key {key}; ssl_client_certificate {root}; \
             ssl_verify_client on; ssl_protocols TLSv1.3; ssl_ecdh_curve X25519; ssl_session_cache off; \
             ssl_session_tickets {tickets}; ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;"
        )
    } else {
        String::new()
    };
    let (scheme, tls_out) = if node.tls_out() {
        let name = &node.other().dns;
        let settings = format!(
            "proxy_ssl_certificate {certificate}; proxy_ssl_certificate_key {key}; \
             proxy_ssl_trusted_certificate {root}; proxy_ssl_verify on; proxy_ssl_name {name}; \
             proxy_ssl_server_name on; proxy_ssl_protocols TLSv1.3; \
             proxy_ssl_conf_command Ciphersuites TLS_AES_128_GCM_SHA256;"
        );
        ("https", settings)
    } else {
        ("http", String::new())
    };
    let ssl = if node.tls_in() { " ssl" } else { "" };
    let (workers, listen, upstream) = (node.workers, node.listen, node.upstream);
    let user = if nix::unistd::Uid::effective().is_root() { "user root;" } else { "" };
    // Each connection counts twice: from the client and to the server.
    let connections = node.connections.max(4_000) * 2;
    let module = stream_module().filter(|_| node.protocol.is_tcp());
    let module = module.map_or_else(String::new, |path| format!("load_module {};\n", path.display()));
    let start = format!(
        "{module}daemon off; {user} worker_processes {workers}; pid {folder}/{side}-nginx.pid; \
         error_log stderr error;\nevents {{ worker_connections {connections}; }}\n"
    );
    if node.protocol.is_tcp() {
        return format!(
            "{start}stream {{ server {{ listen {listen} reuseport backlog=4096; \
             proxy_buffer_size 64k; proxy_pass {upstream}; }} }}\n"
        );
    }
    let mut clusters = String::new();
    for number in 1..node.clusters {
        // Writing to a String cannot fail.
        let _ = writeln!(clusters, "  upstream u{number} {{ server 127.0.0.1:{number}; }}");
    }
    format!(
        "{start}\
         http {{ access_log off; keepalive_requests 1000000000; keepalive_timeout 300s; tcp_nodelay on;\n  \
         client_body_temp_path {folder}/{side}-b; proxy_temp_path {folder}/{side}-p;\n  \
         fastcgi_temp_path {folder}/{side}-f; uwsgi_temp_path {folder}/{side}-u; scgi_temp_path {folder}/{side}-s;\n\
         {clusters}  \
         upstream u {{ server {upstream}; keepalive 256; keepalive_requests 1000000000; \
         keepalive_timeout 300s; }}\n  \
         server {{ listen {listen}{ssl} reuseport backlog=4096; {tls_in}\n    \
         location / {{ proxy_pass {scheme}://u; proxy_http_version 1.1; proxy_set_header Connection \"\"; \
         proxy_set_header Host $host; {tls_out} }} }} }}\n"
    )
}
