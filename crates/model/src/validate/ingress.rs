//! Validation of Ingress and IngressClass, as by the API server.

use super::{Code, Finding, Findings, host};
use crate::api::{
    Ingress, IngressClass,
    ingress::{IngressBackend, IngressPath, PathType},
};

/// Checks an Ingress.
pub(crate) fn ingress(spec: &Ingress) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.rules.is_empty() && spec.default_backend.is_none() {
        findings.add(Code::MissingField, "spec", "has neither rules nor defaultBackend", "add a rule");
    }
    if let Some(of) = &spec.default_backend {
        let message = "has no effect, as in Istio";
        findings.add(Code::NoEffect, "spec.defaultBackend", message, "add a rule without a host");
        backend(of, "spec.defaultBackend", &mut findings);
    }
    for (index, tls) in spec.tls.iter().enumerate() {
        let field = format!("spec.tls[{index}]");
        for (index, name) in tls.hosts.iter().enumerate() {
            host(name, &format!("{field}.hosts[{index}]"), &mut findings);
        }
        if tls.secret_name.is_empty() {
            let message = "is missing: no certificate is served for these hosts";
            findings.add(Code::NoEffect, format!("{field}.secretName"), message, "set the name of a Secret");
        }
    }
    for (index, rule) in spec.rules.iter().enumerate() {
        let field = format!("spec.rules[{index}]");
        if rule.host.parse::<std::net::IpAddr>().is_ok() {
            let message = format!("{:?} is an address, not a host name", rule.host);
            findings.add(
                Code::InvalidHost,
                format!("{field}.host"),
                message,
                "write a host name, or no host",
            );
        } else if !rule.host.is_empty() {
            host(&rule.host, &format!("{field}.host"), &mut findings);
        }
        match &rule.http {
            None => {
                findings.add(
                    Code::NoEffect,
                    format!("{field}.http"),
                    "is missing: the rule has no effect",
                    "add paths",
                );
            }
            Some(http) if http.paths.is_empty() => {
                findings.add(Code::EmptyField, format!("{field}.http.paths"), "is empty", "add a path");
            }
            Some(http) => {
                for (index, of) in http.paths.iter().enumerate() {
                    path(of, &format!("{field}.http.paths[{index}]"), &mut findings);
                }
            }
        }
    }
    findings.done()
}

fn path(of: &IngressPath, field: &str, findings: &mut Findings) {
    match of.path_type {
        None => findings.add(
            Code::MissingField,
            format!("{field}.pathType"),
            "is missing",
            "set Exact, Prefix or ImplementationSpecific",
        ),
        Some(PathType::Exact | PathType::Prefix) if !of.path.starts_with('/') => {
            findings.add(
                Code::InvalidPath,
                format!("{field}.path"),
                "does not begin with '/'",
                "write an absolute path",
            );
        }
        Some(PathType::Exact | PathType::Prefix) => {
            let bad = ["//", "/./", "/../", "%2f", "%2F"].into_iter().find(|bad| of.path.contains(bad));
            let bad = bad.or_else(|| ["/..", "/."].into_iter().find(|bad| of.path.ends_with(bad)));
            if let Some(bad) = bad {
                findings.add(
                    Code::InvalidPath,
                    format!("{field}.path"),
                    format!("contains {bad:?}"),
                    "normalize the path",
                );
            }
        }
        Some(PathType::ImplementationSpecific) if !of.path.is_empty() && !of.path.starts_with('/') => {
            findings.add(
                Code::InvalidPath,
                format!("{field}.path"),
                "does not begin with '/'",
                "write an absolute path",
            );
        }
        Some(PathType::ImplementationSpecific) => {}
    }
    backend(&of.backend, &format!("{field}.backend"), findings);
}

fn backend(of: &IngressBackend, field: &str, findings: &mut Findings) {
    match (&of.service, &of.resource) {
        (Some(_), Some(_)) => {
            findings.add(Code::ExclusiveFields, field, "has service and resource", "remove one of them");
        }
        (None, None) => {
            findings.add(Code::MissingField, format!("{field}.service"), "is missing", "set the Service");
        }
        (None, Some(_)) => {
            let message = "is not supported, nor in Istio: the path has no effect";
            findings.add(Code::UnsupportedField, format!("{field}.resource"), message, "set service");
        }
        (Some(service), None) => {
            if service.name.is_empty() {
                findings.add(
                    Code::MissingField,
                    format!("{field}.service.name"),
                    "is missing",
                    "set the name of a Service",
                );
            }
            match (service.port.name.is_empty(), service.port.number) {
                (true, 0) => {
                    let field = format!("{field}.service.port");
                    findings.add(Code::MissingField, field, "is missing", "set number or name");
                }
                (false, 1..) => {
                    let field = format!("{field}.service.port");
                    findings.add(Code::ExclusiveFields, field, "has number and name", "remove one of them");
                }
                _ => {}
            }
        }
    }
}

/// Checks an IngressClass.
pub(crate) fn ingress_class(spec: &IngressClass) -> Vec<Finding> {
    let mut findings = Findings::default();
    if spec.controller.is_empty() {
        findings.add(Code::MissingField, "spec.controller", "is missing", "set istio.io/ingress-controller");
    }
    findings.done()
}
