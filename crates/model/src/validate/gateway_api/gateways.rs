//! Validation of GatewayClass, Gateway, ListenerSet, ReferenceGrant and BackendTLSPolicy.

use super::{Code, hostname, limit};
use crate::{
    api::{
        Labels,
        gateway_api::{
            AUTO_PASSTHROUGH, BackendTlsPolicy, BackendValidation, FrontendTls, FrontendTlsConfig,
            GatewayClass, KubernetesGateway, LISTENER_MODE, Listener, ListenerProtocol, ListenerSet,
            ListenerTlsMode, ReferenceGrant, SanType,
        },
    },
    validate::{Finding, Findings, port},
};

/// Checks a GatewayClass.
pub(crate) fn gateway_class(spec: &GatewayClass) -> Vec<Finding> {
    let mut findings = Findings::default();
    if !spec.controller_name.contains('/') {
        let message = format!("{:?} is not DOMAIN/PATH", spec.controller_name);
        findings.add(Code::InvalidName, "spec.controllerName", message, "use istio.io/gateway-controller");
    }
    if spec.parameters_ref.is_some() {
        findings.add(Code::UnsupportedField, "spec.parametersRef", "is not supported and has no effect", "");
    }
    findings.done()
}

/// Checks a Gateway.
pub(crate) fn kubernetes_gateway(spec: &KubernetesGateway, labels: &Labels) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.gateway_class_name.is_empty() {
        findings.add(Code::MissingField, "spec.gatewayClassName", "is missing", "use istio");
    }
    limit(spec.addresses.len(), 16, "spec.addresses", &mut findings);
    let joins_networks = spec.is_between_networks(labels);
    for (index, address) in spec.addresses.iter().enumerate() {
        let kind = address.kind();
        if joins_networks && kind == "IPAddress" && address.value.parse::<std::net::IpAddr>().is_err() {
            let field = format!("spec.addresses[{index}].value");
            let message = format!("{:?} is not an IP address", address.value);
            findings.add(Code::InvalidAddress, field, message, "write an IP address, or use type Hostname");
        } else if kind != "Hostname" && !(joins_networks && kind == "IPAddress") {
            let field = format!("spec.addresses[{index}]");
            let message = "has no effect: the Service of the gateway decides its address";
            findings.add(Code::NoEffect, field, message, "use type Hostname and the name of a Service");
        }
    }
    if let Some(tls) = &spec.tls {
        frontend(&tls.frontend, &mut findings);
    }
    listeners(&spec.listeners, &mut findings);
    findings.done()
}

fn frontend(of: &FrontendTls, findings: &mut Findings) {
    const FIELD: &str = "spec.tls.frontend";
    client_validation(&of.default, &format!("{FIELD}.default"), findings);
    limit(of.per_port.len(), 64, &format!("{FIELD}.perPort"), findings);
    for (index, own) in of.per_port.iter().enumerate() {
        let field = format!("{FIELD}.perPort[{index}]");
        port(own.port, &format!("{field}.port"), findings);
        if of.per_port[..index].iter().any(|other| other.port == own.port) {
            let message = format!("port {} is listed twice", own.port);
            findings.add(Code::DuplicateName, format!("{field}.port"), message, "remove one of them");
        }
        client_validation(&own.tls, &format!("{field}.tls"), findings);
    }
}

fn client_validation(of: &FrontendTlsConfig, field: &str, findings: &mut Findings) {
    let Some(validation) = &of.validation else { return };
    let field = format!("{field}.validation.caCertificateRefs");
    let refs = &validation.ca_certificate_refs;
    if refs.is_empty() {
        findings.add(Code::MissingField, &field, "is missing", "name a ConfigMap or a Secret with ca.crt");
    }
    limit(refs.len(), 8, &field, findings);
    if refs.len() > 1 {
        // As in Istio. Without the others, some clients would be refused.
        let message = "has several references, so the listeners are not served";
        findings.add(Code::NoEffect, format!("{field}[1]"), message, "unite the certificates in one object");
    }
    for (index, _) in refs.iter().enumerate().filter(|(_, of)| of.name.is_empty()) {
        let field = format!("{field}[{index}].name");
        findings.add(Code::MissingField, field, "is missing", "set the name of the object");
    }
}

/// Checks a ListenerSet.
pub(crate) fn listener_set(spec: &ListenerSet) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.parent_ref.name.is_empty() {
        findings.add(Code::MissingField, "spec.parentRef.name", "is missing", "set the name of the Gateway");
    }
    listeners(&spec.listeners, &mut findings);
    findings.done()
}

/// Checks a ReferenceGrant.
pub(crate) fn reference_grant(spec: &ReferenceGrant) -> Vec<Finding> {
    let mut findings = Findings::default();
    for (length, field) in [(spec.from.len(), "spec.from"), (spec.to.len(), "spec.to")] {
        if length == 0 {
            findings.add(Code::MissingField, field, "is missing", "add an item");
        }
        limit(length, 16, field, &mut findings);
    }
    for (index, from) in spec.from.iter().enumerate() {
        for (name, value) in [("kind", &from.kind), ("namespace", &from.namespace)] {
            if value.is_empty() {
                findings.add(
                    Code::MissingField,
                    format!("spec.from[{index}].{name}"),
                    "is missing",
                    "set it",
                );
            }
        }
    }
    for (index, _) in spec.to.iter().enumerate().filter(|(_, to)| to.kind.is_empty()) {
        findings.add(Code::MissingField, format!("spec.to[{index}].kind"), "is missing", "set it");
    }
    findings.done()
}

/// Checks a BackendTLSPolicy.
pub(crate) fn backend_tls_policy(spec: &BackendTlsPolicy) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.target_refs.is_empty() {
        findings.add(Code::MissingField, "spec.targetRefs", "is missing", "add a Service");
    }
    limit(spec.target_refs.len(), 16, "spec.targetRefs", &mut findings);
    for (index, of) in spec.target_refs.iter().enumerate() {
        let field = format!("spec.targetRefs[{index}]");
        if of.name.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.name"),
                "is missing",
                "set the name of a Service",
            );
        }
        let (group, kind) = (of.group.as_deref().unwrap_or_default(), of.kind.as_deref().unwrap_or_default());
        if !matches!((group, kind), ("", "Service") | ("networking.istio.io", "ServiceEntry")) {
            let message = format!("targets of kind {kind:?} of group {group:?} have no effect");
            findings.add(
                Code::NoEffect,
                &field,
                message,
                "use a Service, or a ServiceEntry of networking.istio.io",
            );
        }
        if spec.target_refs[..index].contains(of) {
            findings.add(
                Code::DuplicateName,
                &field,
                "is listed twice",
                "remove one of them, or set sectionName",
            );
        }
    }
    backend_validation(&spec.validation, &mut findings);
    for name in spec.options.keys() {
        findings.add(
            Code::UnsupportedField,
            skysail_yaml::join("spec.options", name),
            "is not supported and has no effect",
            "",
        );
    }
    findings.done()
}

fn backend_validation(of: &BackendValidation, findings: &mut Findings) {
    const FIELD: &str = "spec.validation";
    if of.hostname.is_empty() {
        let remedy = "set the name of the server";
        findings.add(Code::MissingField, format!("{FIELD}.hostname"), "is missing", remedy);
    } else {
        hostname(&of.hostname, false, &format!("{FIELD}.hostname"), findings);
    }
    match (&of.well_known_ca_certificates, of.ca_certificate_refs.is_empty()) {
        (None, true) => {
            let remedy = "set caCertificateRefs, or wellKnownCACertificates: System";
            findings.add(Code::MissingField, FIELD, "has no certificates to verify with", remedy);
        }
        (Some(_), false) => {
            let message = "has caCertificateRefs and wellKnownCACertificates";
            findings.add(Code::ExclusiveFields, FIELD, message, "remove one of them");
        }
        (Some(name), true) if name != "System" => {
            let field = format!("{FIELD}.wellKnownCACertificates");
            findings.add(Code::InvalidValue, field, format!("{name:?} is unknown"), "write System");
        }
        _ => {}
    }
    limit(of.ca_certificate_refs.len(), 8, &format!("{FIELD}.caCertificateRefs"), findings);
    if of.ca_certificate_refs.len() > 1 {
        let field = format!("{FIELD}.caCertificateRefs[1]");
        findings.add(
            Code::NoEffect,
            field,
            "has no effect: as in Istio, the first is used",
            "unite the certificates",
        );
    }
    for (index, to) in of.ca_certificate_refs.iter().enumerate() {
        let field = format!("{FIELD}.caCertificateRefs[{index}]");
        let group = to.group.as_deref().unwrap_or_default();
        if (group, to.kind.as_deref().unwrap_or_default()) != ("", "ConfigMap") {
            let message = "is no ConfigMap, so connections to the backends fail";
            findings.add(Code::NoEffect, field, message, "use a ConfigMap with key ca.crt");
        }
    }
    limit(of.subject_alt_names.len(), 5, &format!("{FIELD}.subjectAltNames"), findings);
    for (index, name) in of.subject_alt_names.iter().enumerate() {
        let field = format!("{FIELD}.subjectAltNames[{index}]");
        let (own, other, missing) = match name.kind {
            SanType::Hostname => (&name.hostname, &name.uri, "hostname"),
            SanType::Uri => (&name.uri, &name.hostname, "uri"),
        };
        if own.is_empty() {
            findings.add(
                Code::MissingField,
                format!("{field}.{missing}"),
                "is missing",
                "set it, or another type",
            );
        }
        if !other.is_empty() {
            findings.add(Code::ExclusiveFields, &field, "has hostname and uri", "remove one of them");
        }
    }
}

fn listeners(list: &[Listener], findings: &mut Findings) {
    if list.is_empty() {
        findings.add(Code::MissingField, "spec.listeners", "is missing", "add a listener");
    }
    limit(list.len(), 64, "spec.listeners", findings);
    for (index, of) in list.iter().enumerate() {
        let field = format!("spec.listeners[{index}]");
        if of.name.is_empty() || of.name.len() > 253 || !super::is_dns_name(&of.name) {
            findings.add(
                Code::InvalidName,
                format!("{field}.name"),
                format!("{:?} is not a valid name", of.name),
                "set a name",
            );
        }
        if list[..index].iter().any(|other| other.name == of.name) {
            findings.add(
                Code::DuplicateName,
                format!("{field}.name"),
                format!("{:?} is used twice", of.name),
                "use another name",
            );
        }
        let same = |other: &Listener| {
            (other.port, other.protocol, &other.hostname) == (of.port, of.protocol, &of.hostname)
        };
        if list[..index].iter().any(same) {
            let message = "has the port, protocol and hostname of another listener";
            findings.add(Code::ListenerConflict, &field, message, "merge the two");
        }
        listener(of, &field, findings);
    }
}

fn listener(of: &Listener, field: &str, findings: &mut Findings) {
    use ListenerProtocol::{Http, Https, Other, Tcp, Tls, Udp};
    port(of.port, &format!("{field}.port"), findings);
    if let Some(name) = of.hostname.as_ref().filter(|name| !name.is_empty()) {
        hostname(name, true, &format!("{field}.hostname"), findings);
    }
    let at = format!("{field}.protocol");
    let Some(protocol) = of.protocol else {
        return findings.add(Code::MissingField, at, "is missing", "use HTTP, HTTPS, TLS or TCP");
    };
    if matches!(protocol, Udp | Other) {
        let message = match protocol {
            Udp => "UDP is not supported: the listener is not served",
            _ => "is not a supported protocol: the listener is not served",
        };
        findings.add(Code::UnsupportedField, at, message, "use HTTP, HTTPS, TLS or TCP");
    }
    let kinds = of.allowed_routes.as_ref().map_or(0, |allowed| allowed.kinds.len());
    limit(kinds, 8, &format!("{field}.allowedRoutes.kinds"), findings);
    for index in of.unsupported_kinds().filter(|_| !matches!(protocol, Udp | Other)) {
        let field = format!("{field}.allowedRoutes.kinds[{index}]");
        let known: Vec<_> = of.kinds().iter().map(|kind| kind.as_str()).collect();
        let remedy = format!("use {}", known.join(" or "));
        findings.add(Code::NoEffect, field, "has no effect for this protocol and mode of TLS", remedy);
    }
    if matches!(protocol, Tcp | Udp) && of.hostname.as_ref().is_some_and(|name| !name.is_empty()) {
        findings.add(
            Code::FieldNotAllowed,
            format!("{field}.hostname"),
            "is not allowed for TCP and UDP",
            "remove it",
        );
    }
    let at = format!("{field}.tls");
    match (&of.tls, protocol) {
        (Some(_), Http | Tcp | Udp) => {
            findings.add(Code::TlsOnPlainPort, at, "is not allowed for this protocol", "remove it");
        }
        (None, Https) => {
            let message = "is missing: as in Istio, the listener is not served";
            findings.add(Code::NoEffect, at, message, "set mode and certificateRefs");
        }
        (None, Tls) => {
            findings.add(Code::ServerWithoutTls, at, "is missing", "set mode and certificateRefs");
        }
        (Some(tls), Https) if tls.mode == ListenerTlsMode::Passthrough => {
            findings.add(
                Code::FieldNotAllowed,
                format!("{at}.mode"),
                "HTTPS cannot be passed through",
                "use protocol TLS",
            );
        }
        (Some(tls), _) => {
            limit(tls.certificate_refs.len(), 64, &format!("{at}.certificateRefs"), findings);
            let mesh = tls.options.get("gateway.istio.io/tls-terminate-mode");
            let needs_none = tls.mode == ListenerTlsMode::Passthrough
                || mesh.is_some_and(|mode| mode == "ISTIO_MUTUAL" || mode == "ISTIO_SIMPLE");
            if tls.certificate_refs.is_empty() && !needs_none {
                findings.add(
                    Code::MissingField,
                    format!("{at}.certificateRefs"),
                    "is missing",
                    "name a Secret",
                );
            }
            let is_known = |key: &str, value: &str| match key {
                "gateway.istio.io/tls-terminate-mode" => true,
                LISTENER_MODE => value == AUTO_PASSTHROUGH,
                _ => false,
            };
            let unknown = tls.options.iter().filter(|(key, value)| !is_known(key, value));
            for (option, _) in unknown {
                let field = skysail_yaml::join(&format!("{at}.options"), option);
                findings.add(Code::UnsupportedField, field, "is not supported and has no effect", "");
            }
        }
        (None, Http | Tcp | Udp) | (_, Other) => {}
    }
}
