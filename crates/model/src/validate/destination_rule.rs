//! Validation of DestinationRules.

use super::{
    Code, Finding, Findings, export_to, host, is_label_text, locality, milliseconds, percent, port,
    secret_name,
};
use crate::api::{
    DestinationRule, TrafficPolicy,
    destination_rule::{
        ClientTls, ClientTlsMode, ConnectionPool, ConsistentHash, LoadBalancer, OutlierDetection, Tunnel,
    },
};

/// Checks a DestinationRule.
pub(crate) fn destination_rule(spec: &DestinationRule) -> Vec<Finding> {
    let mut findings = Findings::default();
    host(&spec.host, "spec.host", &mut findings);
    export_to(&spec.export_to, "spec.exportTo", &mut findings);
    if let Some(policy) = &spec.traffic_policy {
        traffic_policy(policy, false, "spec.trafficPolicy", &mut findings);
    }
    for (index, subset) in spec.subsets.iter().enumerate() {
        let field = format!("spec.subsets[{index}]");
        if subset.name.is_empty() {
            findings.add(Code::MissingField, format!("{field}.name"), "is missing", "set a name");
        } else if !is_label_text(&subset.name, false) {
            let message = format!("{:?} is not a valid subset name", subset.name);
            findings.add(
                Code::InvalidName,
                format!("{field}.name"),
                message,
                "use lower-case letters, digits and '-'",
            );
        } else if spec.subsets[..index].iter().any(|other| other.name == subset.name) {
            let message = format!("{:?} is defined twice", subset.name);
            findings.add(
                Code::DuplicateName,
                format!("{field}.name"),
                message,
                "use a different name for each subset",
            );
        }
        // A subset without labels often has settings of its own for all endpoints.
        if subset.labels.is_empty() && subset.traffic_policy.is_none() {
            let message = "is missing, so the subset contains every endpoint of the host";
            findings.add(
                Code::SubsetWithoutLabels,
                format!("{field}.labels"),
                message,
                "add the labels of the subset's pods",
            );
        }
        if let Some(policy) = &subset.traffic_policy {
            let of_rule = spec.traffic_policy.as_ref();
            let inherits = of_rule.is_some_and(|policy| policy.outlier_detection.is_some());
            traffic_policy(policy, inherits, &format!("{field}.trafficPolicy"), &mut findings);
        }
    }
    if spec.workload_selector.is_none() {
        for field in credentials(spec) {
            let message = "reaches gateways only: sidecars get it from rules with a workloadSelector, and connect \
                           without TLS here";
            let remedy = "add a workloadSelector if sidecars connect to the host themselves";
            findings.add(Code::CredentialForGateways, field, message, remedy);
        }
    }
    findings.done()
}

/// Returns the fields with a credential.
fn credentials(spec: &DestinationRule) -> Vec<String> {
    let subsets = spec.subsets.iter().enumerate().map(|(index, subset)| {
        (format!("spec.subsets[{index}].trafficPolicy"), subset.traffic_policy.as_ref())
    });
    let policies = std::iter::once(("spec.trafficPolicy".to_owned(), spec.traffic_policy.as_ref()));
    let mut fields = Vec::new();
    for (at, policy) in policies.chain(subsets) {
        let Some(policy) = policy else { continue };
        let of_ports = policy.port_level_settings.iter().enumerate();
        let of_ports =
            of_ports.map(|(index, port)| (format!("{at}.portLevelSettings[{index}]"), port.tls.as_ref()));
        for (at, tls) in std::iter::once((at.clone(), policy.tls.as_ref())).chain(of_ports) {
            if tls.is_some_and(|tls| !tls.credential_name.is_empty()) {
                fields.push(format!("{at}.tls.credentialName"));
            }
        }
    }
    fields
}

/// Checks a policy. `inherits` is whether it inherits outlier detection.
fn traffic_policy(policy: &TrafficPolicy, inherits: bool, field: &str, findings: &mut Findings) {
    let ejects = inherits || policy.outlier_detection.is_some();
    settings(
        policy.load_balancer.as_ref(),
        policy.connection_pool.as_ref(),
        policy.outlier_detection.as_ref(),
        policy.tls.as_ref(),
        ejects,
        field,
        findings,
    );
    if let Some(share) = policy.retry_budget.as_ref().and_then(|budget| budget.percent) {
        percent(share, &format!("{field}.retryBudget.percent"), findings);
    }
    if let Some(of) = &policy.tunnel {
        tunnel(of, &format!("{field}.tunnel"), findings);
    }
    let version = policy.proxy_protocol.as_ref().map_or("", |protocol| protocol.version.as_str());
    if !matches!(version, "" | "V1" | "V2") {
        let field = format!("{field}.proxyProtocol.version");
        findings.add(Code::UnknownValue, field, format!("{version:?} is not a version"), "use V1 or V2");
    }
    for (index, of_port) in policy.port_level_settings.iter().enumerate() {
        let field = format!("{field}.portLevelSettings[{index}]");
        port(of_port.port.number, &format!("{field}.port.number"), findings);
        settings(
            of_port.load_balancer.as_ref(),
            of_port.connection_pool.as_ref(),
            of_port.outlier_detection.as_ref(),
            of_port.tls.as_ref(),
            of_port.outlier_detection.is_some(),
            &field,
            findings,
        );
    }
}

fn tunnel(tunnel: &Tunnel, field: &str, findings: &mut Findings) {
    if !matches!(tunnel.protocol.as_str(), "" | "CONNECT" | "POST") {
        let message = format!("{:?} is not a protocol", tunnel.protocol);
        findings.add(Code::UnknownValue, format!("{field}.protocol"), message, "use CONNECT");
    }
    let name = &tunnel.target_host;
    if name.contains('*') {
        let message = format!("{name:?} is not a single host");
        findings.add(Code::InvalidHost, format!("{field}.targetHost"), message, "name one host");
    } else {
        host(name, &format!("{field}.targetHost"), findings);
    }
    port(tunnel.target_port, &format!("{field}.targetPort"), findings);
}

fn settings(
    load_balancer: Option<&LoadBalancer>,
    pool: Option<&ConnectionPool>,
    outliers: Option<&OutlierDetection>,
    tls: Option<&ClientTls>,
    ejects: bool,
    field: &str,
    findings: &mut Findings,
) {
    if let Some(load_balancer) = load_balancer {
        balancer(load_balancer, ejects, &format!("{field}.loadBalancer"), findings);
    }
    if let Some(pool) = pool {
        connection_pool(pool, &format!("{field}.connectionPool"), findings);
    }
    if let Some(outliers) = outliers {
        outlier_detection(outliers, &format!("{field}.outlierDetection"), findings);
    }
    if let Some(tls) = tls {
        client_tls(tls, &format!("{field}.tls"), findings);
    }
}

fn balancer(balancer: &LoadBalancer, ejects: bool, field: &str, findings: &mut Findings) {
    locality::of_rule(balancer, ejects, field, findings);
    if balancer.simple.is_some() && balancer.consistent_hash.is_some() {
        findings.add(
            Code::ExclusiveFields,
            field,
            "simple and consistentHash exclude each other",
            "remove one of them",
        );
    }
    if let Some(hash) = &balancer.consistent_hash {
        consistent_hash(hash, &format!("{field}.consistentHash"), findings);
    }
    if let Some(warmup) = &balancer.warmup {
        let field = format!("{field}.warmup");
        if warmup.duration.is_none() {
            findings.add(Code::MissingField, format!("{field}.duration"), "is missing", "set a duration");
        }
        if let Some(share) = warmup.minimum_percent {
            percent(share, &format!("{field}.minimumPercent"), findings);
        }
        if warmup.aggression.is_some_and(|aggression| aggression < 1.0) {
            findings.add(Code::OutOfRange, format!("{field}.aggression"), "is below 1", "use 1 or more");
        }
    }
}

fn consistent_hash(hash: &ConsistentHash, field: &str, findings: &mut Findings) {
    let keys = [
        hash.http_header_name.is_some(),
        hash.http_cookie.is_some(),
        hash.use_source_ip.is_some(),
        hash.http_query_parameter_name.is_some(),
    ];
    if keys.iter().filter(|given| **given).count() != 1 {
        let remedy = "set httpHeaderName, httpCookie, useSourceIp or httpQueryParameterName";
        findings.add(Code::ExclusiveFields, field, "must have exactly one hash key", remedy);
    }
    if hash.ring_hash.is_some() && hash.maglev.is_some() {
        findings.add(
            Code::ExclusiveFields,
            field,
            "ringHash and maglev exclude each other",
            "remove one of them",
        );
    }
    if hash.http_cookie.as_ref().is_some_and(|cookie| cookie.name.is_empty()) {
        findings.add(
            Code::MissingField,
            format!("{field}.httpCookie.name"),
            "is missing",
            "set the name of the cookie",
        );
    }
}

pub(super) fn connection_pool(pool: &ConnectionPool, field: &str, findings: &mut Findings) {
    if pool.tcp.is_none() && pool.http.is_none() {
        findings.add(Code::EmptyField, field, "is empty", "set tcp or http");
    }
    if let Some(tcp) = &pool.tcp {
        let field = format!("{field}.tcp");
        not_negative(tcp.max_connections, &format!("{field}.maxConnections"), findings);
        milliseconds(tcp.connect_timeout, &format!("{field}.connectTimeout"), findings);
        milliseconds(tcp.max_connection_duration, &format!("{field}.maxConnectionDuration"), findings);
    }
    if let Some(http) = &pool.http {
        let field = format!("{field}.http");
        for (value, name) in [
            (http.http1_max_pending_requests, "http1MaxPendingRequests"),
            (http.http2_max_requests, "http2MaxRequests"),
            (http.max_requests_per_connection, "maxRequestsPerConnection"),
            (http.max_retries, "maxRetries"),
            (http.max_concurrent_streams, "maxConcurrentStreams"),
        ] {
            not_negative(value, &format!("{field}.{name}"), findings);
        }
        milliseconds(http.idle_timeout, &format!("{field}.idleTimeout"), findings);
        if http.use_client_protocol && http.h2_upgrade_policy.is_some() {
            findings.add(
                Code::ExclusiveFields,
                format!("{field}.useClientProtocol"),
                "is not allowed together with h2UpgradePolicy",
                "remove one of them",
            );
        }
    }
}

pub(super) fn outlier_detection(outliers: &OutlierDetection, field: &str, findings: &mut Findings) {
    if outliers.consecutive_errors != 0 {
        let remedy = "use consecutive5xxErrors or consecutiveGatewayErrors";
        findings.add(
            Code::Deprecated,
            format!("{field}.consecutiveErrors"),
            "was removed from Istio and has no effect",
            remedy,
        );
    }
    milliseconds(outliers.interval, &format!("{field}.interval"), findings);
    milliseconds(outliers.base_ejection_time, &format!("{field}.baseEjectionTime"), findings);
    percent(f64::from(outliers.max_ejection_percent), &format!("{field}.maxEjectionPercent"), findings);
    percent(f64::from(outliers.min_health_percent), &format!("{field}.minHealthPercent"), findings);
    for (index, code) in outliers.outlier_detection_http_error_codes.iter().enumerate() {
        if !(100..600).contains(code) {
            let field = format!("{field}.outlierDetectionHttpErrorCodes[{index}]");
            findings.add(Code::InvalidStatus, field, format!("{code} is not a status"), "use 100 to 599");
        }
    }
}

/// Checks TLS to unknown hosts of HTTP.
pub(super) fn unknown_hosts_tls(tls: &ClientTls, field: &str, findings: &mut Findings) {
    client_tls(tls, field, findings);
    if tls.mode == ClientTlsMode::IstioMutual {
        let message = "is not supported: the identities of unknown hosts are not known";
        findings.add(Code::Unsupported, format!("{field}.mode"), message, "use SIMPLE or MUTUAL");
    }
    if !tls.credential_name.is_empty() {
        let message = "is not supported: sidecars read no Secrets for all workloads";
        findings.add(Code::Unsupported, format!("{field}.credentialName"), message, "use files");
    }
}

fn client_tls(tls: &ClientTls, field: &str, findings: &mut Findings) {
    let files = [
        (&tls.client_certificate, "clientCertificate"),
        (&tls.private_key, "privateKey"),
        (&tls.ca_certificates, "caCertificates"),
        (&tls.credential_name, "credentialName"),
    ];
    let credential = !tls.credential_name.is_empty();
    secret_name(&tls.credential_name, &format!("{field}.credentialName"), findings);
    for (value, name) in [files[0], files[1], files[2], (&tls.ca_crl, "caCrl")] {
        if credential && !value.is_empty() {
            let message = "is not allowed together with credentialName";
            findings.add(Code::ExclusiveFields, format!("{field}.{name}"), message, "remove one of them");
        }
    }
    match tls.mode {
        ClientTlsMode::IstioMutual => {
            for (_, name) in files.iter().filter(|(value, _)| !value.is_empty()) {
                let message = "is not allowed with ISTIO_MUTUAL, which uses the certificates of the mesh";
                findings.add(
                    Code::FieldNotAllowed,
                    format!("{field}.{name}"),
                    message,
                    "remove it, or use mode MUTUAL",
                );
            }
        }
        ClientTlsMode::Mutual if tls.credential_name.is_empty() => {
            for (_, name) in files[..2].iter().filter(|(value, _)| value.is_empty()) {
                findings.add(
                    Code::MissingField,
                    format!("{field}.{name}"),
                    "is missing; mode MUTUAL requires it",
                    "set the path of the file",
                );
            }
        }
        _ => {}
    }
}

fn not_negative(value: i32, field: &str, findings: &mut Findings) {
    if value < 0 {
        findings.add(Code::OutOfRange, field, format!("{value} is below 0"), "use 0 or more");
    }
}
