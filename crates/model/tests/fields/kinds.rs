//! Every field of the types has a line, and every line is about a field.

use std::{collections::BTreeMap, fmt::Write as _};

use skysail_model::{
    api,
    fields::{FieldRow, KindFields, Support, kinds},
};

use crate::trace::{Holds, Traced, fields};

/// Returns the fields of the types of each table.
pub(crate) fn traced(name: &str) -> Vec<Traced> {
    match name {
        "VirtualService" => fields::<api::VirtualService>(),
        "DestinationRule" => fields::<api::DestinationRule>(),
        "Gateway" => fields::<api::Gateway>(),
        "ServiceEntry" => fields::<api::ServiceEntry>(),
        "WorkloadEntry" => fields::<api::WorkloadEntry>(),
        "WorkloadGroup" => fields::<api::WorkloadGroup>(),
        "Sidecar" => fields::<api::Sidecar>(),
        "PeerAuthentication" => fields::<api::PeerAuthentication>(),
        "RequestAuthentication" => fields::<api::RequestAuthentication>(),
        "AuthorizationPolicy" => fields::<api::AuthorizationPolicy>(),
        "Telemetry" => fields::<api::Telemetry>(),
        "ProxyConfig" => fields::<api::ProxyConfig>(),
        "EnvoyFilter" => fields::<api::EnvoyFilter>(),
        "MeshConfig" => fields::<api::MeshConfig>(),
        "MeshNetworks" => fields::<api::mesh_networks::MeshNetworks>(),
        "Service" => of_service(),
        "Ingress" => fields::<api::Ingress>(),
        "IngressClass" => fields::<api::IngressClass>(),
        "GatewayClass" => fields::<api::GatewayClass>(),
        "Gateway of Gateway API" => fields::<api::gateway_api::KubernetesGateway>(),
        "ListenerSet" => fields::<api::ListenerSet>(),
        "HTTPRoute" => fields::<api::HttpRoute>(),
        "GRPCRoute" => fields::<api::GrpcRoute>(),
        "TLSRoute" => fields::<api::TlsRoute>(),
        "TCPRoute" => fields::<api::TcpRoute>(),
        "ReferenceGrant" => fields::<api::ReferenceGrant>(),
        "BackendTLSPolicy" => fields::<api::BackendTlsPolicy>(),
        "WasmPlugin" => fields::<api::WasmPlugin>(),
        "TrafficExtension" => fields::<api::TrafficExtension>(),
        "RateLimitPolicy" => fields::<api::RateLimitPolicy>(),
        _ => panic!("{name} has a table and no type here"),
    }
}

/// Fields of Kubernetes' type, of which the mesh reads some.
fn of_service() -> Vec<Traced> {
    let text = include_str!("../../src/parse/kubernetes.txt");
    let mut found = Vec::new();
    of_type(text, "ServiceSpec", "", &[], &mut found);
    found
}

fn of_type(text: &str, name: &str, at: &str, lists: &[bool], found: &mut Vec<Traced>) {
    let lines =
        text.lines().skip_while(|line| *line != name).skip(1).take_while(|line| line.starts_with("  "));
    for line in lines {
        let (field, of) = line.trim().split_once(' ').unwrap();
        let field = field.trim_end_matches('!');
        let path = if at.is_empty() { field.to_owned() } else { format!("{at}.{field}") };
        let lists = [lists, &[of.starts_with('[')]].concat();
        let of = of.trim_matches(['[', ']']);
        let has_fields = text.lines().any(|line| line == of);
        let holds = if has_fields { Holds::Fields } else { Holds::Value("a".into()) };
        found.push(Traced { path: path.clone(), lists: lists.clone(), holds });
        if has_fields {
            of_type(text, of, &path, &lists, found);
        }
    }
}

/// Lines of a table by path.
struct Table<'a>(BTreeMap<&'a str, &'a FieldRow>);

impl<'a> Table<'a> {
    fn of(kind: &'a KindFields) -> Self {
        Self(
            kind.fields
                .iter()
                .filter(|field| field.value.is_none())
                .map(|field| (field.path, field))
                .collect(),
        )
    }

    /// Whether a line concerns the field, or a field above it as a whole.
    fn has(&self, path: &str) -> bool {
        let whole =
            |field: &&FieldRow| matches!(field.support, Support::Warned | Support::Refused | Support::Unread);
        let above = path.match_indices('.').map(|(end, _)| &path[..end]);
        self.0.contains_key(path)
            || above.filter_map(|path| self.0.get(path).copied()).any(|field| whole(&field))
    }
}

#[test]
fn every_field_of_the_types_has_a_line() {
    let mut missing = String::new();
    for kind in kinds() {
        let table = Table::of(kind);
        for field in traced(kind.name) {
            let line = match &field.holds {
                Holds::Fields => continue,
                Holds::Same(other) => format!("{} | as {other} | |", field.path),
                Holds::Value(_) | Holds::Word(_) => format!("{} | supported | |", field.path),
            };
            if !table.has(&field.path) {
                let _ = writeln!(missing, "{}.txt: {line}", kind.name);
            }
        }
    }
    assert!(missing.is_empty(), "add lines to crates/model/fields, with support, note and tests:\n{missing}");
}

#[test]
fn every_line_is_about_a_field() {
    let mut wrong = Vec::new();
    for kind in kinds() {
        let known = traced(kind.name);
        for field in &kind.fields {
            let name = format!("{}.txt: {}", kind.name, field.path);
            let Some(of) = known.iter().find(|known| known.path == field.path) else {
                // What the types do not have is not decoded, so it cannot be supported.
                if !field.is_reported() && field.support != Support::Unread {
                    wrong.push(format!("{name}: the type has no such field"));
                }
                continue;
            };
            match (field.support, &of.holds) {
                (Support::As(path), Holds::Same(other)) if path == other => {}
                (Support::As(_), holds) => wrong.push(format!("{name}: the type says {holds:?}")),
                (_, Holds::Same(other)) => wrong.push(format!("{name}: is the same as {other}")),
                _ => {}
            }
            if let (Some(value), Holds::Word(words)) = (field.value, &of.holds)
                && !words.contains(&value)
            {
                wrong.push(format!("{name}: {value} is not one of {words:?}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn every_line_is_there_once() {
    for kind in kinds() {
        let mut seen = BTreeMap::new();
        for field in &kind.fields {
            assert_eq!(seen.insert((field.path, field.value), ()), None, "{}: {}", kind.name, field.path);
        }
    }
}
