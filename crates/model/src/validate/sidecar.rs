//! Validation of Sidecar.

use std::net::IpAddr;

use super::{Code, Finding, Findings, destination_rule::connection_pool, host, port, workload::socket};
use crate::api::{
    Sidecar,
    sidecar::{CaptureMode, EgressListener, IngressEndpoint, IngressListener, SidecarOutbound, SidecarPort},
};

/// Checks a Sidecar.
pub(crate) fn sidecar(spec: &Sidecar) -> Vec<Finding> {
    let mut findings = Findings::default();
    let has_any = !spec.ingress.is_empty()
        || !spec.egress.is_empty()
        || spec.outbound_traffic_policy.is_some()
        || spec.inbound_connection_pool.is_some();
    if !has_any {
        findings.add(Code::EmptyField, "spec", "is empty", "set ingress, egress or outboundTrafficPolicy");
    }
    for (index, listener) in spec.ingress.iter().enumerate() {
        let before = &spec.ingress[..index];
        ingress(listener, before, &format!("spec.ingress[{index}]"), &mut findings);
    }
    for (index, listener) in spec.egress.iter().enumerate() {
        let field = format!("spec.egress[{index}]");
        egress(listener, &field, &mut findings);
        if listener.port.is_none() && index + 1 < spec.egress.len() {
            let remedy = "put it last; it serves the ports that the others do not name";
            findings.add(
                Code::MissingField,
                format!("{field}.port"),
                "is missing, and further listeners follow",
                remedy,
            );
        }
        let same = |other: &EgressListener| other.port() == listener.port() && other.bind == listener.bind;
        if listener.port.is_some() && spec.egress[..index].iter().any(same) {
            let remedy = "merge the hosts of both listeners";
            findings.add(
                Code::DuplicatePort,
                format!("{field}.port"),
                "an earlier listener has the same port and bind",
                remedy,
            );
        }
    }
    if let Some(pool) = &spec.inbound_connection_pool {
        connection_pool(pool, "spec.inboundConnectionPool", &mut findings);
    }
    if let Some(policy) = &spec.outbound_traffic_policy {
        outbound(policy, &mut findings);
    }
    findings.done()
}

fn ingress(listener: &IngressListener, before: &[IngressListener], field: &str, findings: &mut Findings) {
    listener_port(&listener.port, field, findings);
    if before.iter().any(|other| other.port.number == listener.port.number) {
        findings.add(
            Code::DuplicatePort,
            format!("{field}.port"),
            "an earlier listener has the same port",
            "remove one of them",
        );
    }
    bind(&listener.bind, field, findings);
    let endpoint = &listener.default_endpoint;
    if !endpoint.is_empty() && IngressEndpoint::parse(endpoint).is_none() {
        let message = format!("{endpoint:?} is not an endpoint of the workload");
        let remedy = "write 127.0.0.1:PORT, 0.0.0.0:PORT, [::1]:PORT, [::]:PORT or unix:///PATH";
        findings.add(Code::InvalidAddress, format!("{field}.defaultEndpoint"), message, remedy);
    }
    if listener.tls.is_some() {
        let message = "has no effect, as in Istio's default installation: the port has the mesh's mutual TLS";
        findings.add(
            Code::NoEffect,
            format!("{field}.tls"),
            message,
            "use a gateway for clients outside the mesh",
        );
    }
    if let Some(pool) = &listener.connection_pool {
        connection_pool(pool, &format!("{field}.connectionPool"), findings);
    }
}

fn egress(listener: &EgressListener, field: &str, findings: &mut Findings) {
    if let Some(path) = listener.socket() {
        return egress_socket(listener, path, field, findings);
    }
    if let Some(port) = &listener.port {
        listener_port(port, field, findings);
    } else if !listener.bind.is_empty() || listener.capture_mode == CaptureMode::None {
        let message = "has no effect without a port";
        findings.add(
            Code::NoEffect,
            format!("{field}.bind"),
            message,
            "set port, or remove bind and captureMode",
        );
    }
    bind(&listener.bind, field, findings);
    hosts(listener, field, findings);
}

/// Checks a listener on a Unix domain socket.
fn egress_socket(listener: &EgressListener, path: &str, field: &str, findings: &mut Findings) {
    socket(path, &format!("{field}.bind"), findings);
    match &listener.port {
        Some(port) if port.number != 0 => {
            let (field, message) = (format!("{field}.port.number"), "is not allowed with a Unix socket");
            findings.add(Code::FieldNotAllowed, field, message, "remove it");
        }
        Some(port) => listener_protocol(port, field, findings),
        None => {
            let (field, message) = (format!("{field}.port"), "is missing, and decides the protocol");
            findings.add(Code::MissingField, field, message, "write port: {protocol: HTTP}");
        }
    }
    if listener.capture_mode == CaptureMode::Iptables {
        let (field, message) = (format!("{field}.captureMode"), "is not allowed with a Unix socket");
        findings.add(Code::FieldNotAllowed, field, message, "use DEFAULT or NONE");
    }
    hosts(listener, field, findings);
}

/// Checks the hosts of a listener.
fn hosts(listener: &EgressListener, field: &str, findings: &mut Findings) {
    if listener.hosts.is_empty() {
        findings.add(
            Code::MissingField,
            format!("{field}.hosts"),
            "is missing",
            "add NAMESPACE/HOST, such as ./*",
        );
    }
    for (index, name) in listener.hosts.iter().enumerate() {
        let field = format!("{field}.hosts[{index}]");
        let Some((namespace, dns)) = name.split_once('/') else {
            let message = format!("{name:?} is not of the form NAMESPACE/HOST");
            findings.add(Code::InvalidHost, field, message, format!("write */{name} or ./{name}"));
            continue;
        };
        let is_name = |name: &str| {
            name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
        };
        let of = namespace.strip_prefix('~').unwrap_or(namespace);
        if namespace.is_empty() || !matches!(of, "*" | ".") && !is_name(of) {
            let message = format!("{namespace:?} is not a namespace");
            let remedy = "write a namespace, '*' or '.'; with '~' before it, the entry excludes its hosts";
            findings.add(Code::InvalidName, field.clone(), message, remedy);
        }
        host(dns, &field, findings);
    }
}

fn listener_port(of: &SidecarPort, field: &str, findings: &mut Findings) {
    port(of.number, &format!("{field}.port.number"), findings);
    listener_protocol(of, field, findings);
}

fn listener_protocol(of: &SidecarPort, field: &str, findings: &mut Findings) {
    if of.parsed_protocol().is_none() {
        let message = format!("{:?} is not a protocol", of.protocol);
        let remedy = "use HTTP, HTTP2, GRPC, GRPC-Web, HTTPS, TLS, TCP, MONGO, MYSQL or REDIS";
        findings.add(Code::UnknownProtocol, format!("{field}.port.protocol"), message, remedy);
    }
}

fn bind(address: &str, field: &str, findings: &mut Findings) {
    if !address.is_empty() && address.parse::<IpAddr>().is_err() {
        let message = format!("{address:?} is not an IP address");
        findings.add(Code::InvalidAddress, format!("{field}.bind"), message, "write an IP address");
    }
}

fn outbound(policy: &SidecarOutbound, findings: &mut Findings) {
    if let Some(proxy) = &policy.egress_proxy {
        let field = "spec.outboundTrafficPolicy.egressProxy";
        host(&proxy.host, &format!("{field}.host"), findings);
        if proxy.host.starts_with('*') || !proxy.host.contains('.') {
            let message = format!("{:?} is not a full name", proxy.host);
            findings.add(
                Code::InvalidHost,
                format!("{field}.host"),
                message,
                "write the full name of a service",
            );
        }
        port(proxy.port.number, &format!("{field}.port.number"), findings);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(spec: serde_json::Value) -> Vec<String> {
        let findings = sidecar(&serde_json::from_value(spec).unwrap());
        findings.into_iter().map(|finding| format!("{} {}", finding.field, finding.message)).collect()
    }

    #[test]
    fn a_complete_sidecar_is_accepted() {
        let spec = serde_json::json!({
            "ingress": [
                {"port": {"number": 80, "protocol": "HTTP"}, "defaultEndpoint": "127.0.0.1:8080"},
                {"port": {"number": 81, "protocol": "TCP"}, "defaultEndpoint": "unix:///run/a.sock"},
                {"port": {"number": 82, "protocol": "GRPC"}, "defaultEndpoint": "[::]:1", "bind": "::1"},
            ],
            "egress": [{"port": {"number": 80, "protocol": "HTTP"}, "hosts": ["./*"]}, {"hosts": ["~/*"]}],
            "outboundTrafficPolicy": {"egressProxy": {"host": "a.b", "port": {"number": 1}}},
        });
        assert_eq!(messages(spec), [""; 0]);
    }

    #[test]
    fn each_error_is_named_by_its_field() {
        assert_eq!(messages(serde_json::json!({})), ["spec is empty"]);
        let spec = serde_json::json!({
            "ingress": [
                {"port": {"number": 0, "protocol": "HTTP"}, "defaultEndpoint": "10.0.0.1:80", "bind": "a"},
                {"port": {"number": 0, "protocol": "X"}, "tls": {"mode": "SIMPLE"}},
            ],
            "egress": [{"hosts": ["a.b", "A/b.c", "./http://x"]}, {"port": {"number": 1}, "hosts": []}],
            "outboundTrafficPolicy": {"egressProxy": {"host": "a"}},
        });
        assert_eq!(
            messages(spec),
            [
                "spec.ingress[0].port.number 0 is not a port",
                "spec.ingress[0].bind \"a\" is not an IP address",
                "spec.ingress[0].defaultEndpoint \"10.0.0.1:80\" is not an endpoint of the workload",
                "spec.ingress[1].port.number 0 is not a port",
                "spec.ingress[1].port.protocol \"X\" is not a protocol",
                "spec.ingress[1].port an earlier listener has the same port",
                "spec.ingress[1].tls has no effect, as in Istio's default installation: the port has the mesh's mutual TLS",
                "spec.egress[0].hosts[0] \"a.b\" is not of the form NAMESPACE/HOST",
                "spec.egress[0].hosts[1] \"A\" is not a namespace",
                "spec.egress[0].hosts[2] \"http://x\" is a URL, not a host",
                "spec.egress[0].port is missing, and further listeners follow",
                "spec.egress[1].hosts is missing",
                "spec.outboundTrafficPolicy.egressProxy.host \"a\" is not a full name",
                "spec.outboundTrafficPolicy.egressProxy.port.number 0 is not a port",
            ]
        );
    }
}
