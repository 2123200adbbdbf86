//! `/config_dump`: the configuration in effect in Envoy's shape, which `istioctl proxy-config` also reads.

use std::{collections::HashMap, sync::Arc, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use prost::Name;
use serde_json::{Map, Value};
use skysail_proto::Codec;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            admin::v3::{
                BootstrapConfigDump, ClientResourceStatus, ClustersConfigDump, ConfigDump,
                EndpointsConfigDump, ListenersConfigDump, RoutesConfigDump, SecretsConfigDump,
                UpdateFailureState,
                clusters_config_dump::{DynamicCluster, StaticCluster},
                endpoints_config_dump::DynamicEndpointConfig,
                listeners_config_dump::{DynamicListener, DynamicListenerState, StaticListener},
                routes_config_dump::{DynamicRouteConfig, StaticRouteConfig},
                secrets_config_dump::{DynamicSecret, StaticSecret},
            },
            config::{
                bootstrap::v3::Bootstrap,
                core::v3::{DataSource, data_source::Specifier},
            },
            extensions::transport_sockets::tls::v3::{
                CertificateValidationContext, Secret, TlsCertificate, secret,
            },
        },
        google::protobuf::{Any, Timestamp},
    },
};

use super::Admin;
use crate::{
    discovery::inventory::{AcceptedResource, Failure, Inventory},
    translate::{
        SecretName, SecretSource, TlsContexts,
        bootstrap::convert::{self, Conversion},
    },
};

/// Returns the whole dump, encoded for the child process that converts it.
pub(super) async fn config_dump(admin: &Admin, include_endpoints: bool) -> Vec<u8> {
    let inventory = admin.configuration.inventory().await;
    let mut configs = vec![pack(&BootstrapConfigDump {
        bootstrap: Bootstrap::from_slice(&admin.bootstrap).ok(),
        last_updated: timestamp(admin.started),
    })];
    configs.push(pack(&clusters(&inventory)));
    if include_endpoints {
        configs.push(pack(&endpoints(&inventory)));
    }
    configs.push(pack(&listeners(&inventory)));
    configs.push(pack(&routes(&inventory)));
    configs.push(pack(&secrets(admin.configuration.tls())));
    ConfigDump { configs }.to_vec()
}

/// Returns a dump of one section, encoded for the child process.
pub(super) fn wrap<M: Codec + Name>(message: &M) -> Vec<u8> {
    ConfigDump { configs: vec![pack(message)] }.to_vec()
}

/// Converts a dump to JSON in a child process.
pub(super) fn to_json(dump: Vec<u8>) -> anyhow::Result<Value> {
    Ok(serde_json::from_slice(&convert::convert_in_child(Conversion::ConfigDump, dump)?)?)
}

/// Applies the parameters `resource`, `name_regex` and `mask`.
pub(super) fn select(mut dump: Value, options: &HashMap<String, String>) -> Result<Value, String> {
    let names = options.get("name_regex").map(|pattern| regex::Regex::new(pattern)).transpose();
    let names = names.map_err(|error| format!("name_regex: {error}\n"))?;
    if let Some(resource) = options.get("resource") {
        let configs = dump["configs"].as_array_mut().map(std::mem::take).unwrap_or_default();
        let mut found = Vec::new();
        for mut config in configs {
            let section = config["@type"].as_str().map(str::to_owned).unwrap_or_default();
            match config.get_mut(resource).map(Value::take) {
                Some(Value::Array(items)) => found.extend(items),
                Some(other) => found.push(other),
                None => continue,
            }
            if let Some(kind) = element(resource) {
                let kind = Value::String(format!("{section}{kind}"));
                found.iter_mut().for_each(|item| item["@type"] = kind.clone());
            }
        }
        dump["configs"] = Value::Array(found);
    }
    if let Some(pattern) = names {
        for item in dump["configs"].as_array_mut().into_iter().flatten() {
            retain_names(item, &pattern);
        }
        if let Some(items) = dump["configs"].as_array_mut().filter(|_| options.contains_key("resource")) {
            items.retain(|item| name_of(item).is_some_and(|name| pattern.is_match(name)));
        }
    }
    if let Some(mask) = options.get("mask") {
        let paths: Vec<&str> = mask.split(',').collect();
        dump["configs"].as_array_mut().into_iter().flatten().for_each(|item| keep_fields(item, &paths));
        if let Some(items) = dump["configs"].as_array_mut() {
            items.retain(|item| item.as_object().is_some_and(|object: &Map<_, _>| object.len() > 1));
        }
    }
    Ok(dump)
}

/// Returns the message type of a list's elements, relative to the type of its section.
fn element(list: &str) -> Option<&'static str> {
    Some(match list {
        "static_clusters" => ".StaticCluster",
        "dynamic_active_clusters" | "dynamic_warming_clusters" => ".DynamicCluster",
        "static_listeners" => ".StaticListener",
        "dynamic_listeners" => ".DynamicListener",
        "static_route_configs" => ".StaticRouteConfig",
        "dynamic_route_configs" => ".DynamicRouteConfig",
        "static_secrets" => ".StaticSecret",
        "dynamic_active_secrets" | "dynamic_warming_secrets" => ".DynamicSecret",
        "dynamic_endpoint_configs" => ".DynamicEndpointConfig",
        _ => return None,
    })
}

/// Keeps only the fields on these paths, such as `cluster.name`.
fn keep_fields(value: &mut Value, paths: &[&str]) {
    let Value::Object(fields) = value else { return };
    fields.retain(|name, field| {
        if name == "@type" {
            return true;
        }
        let inner = |path: &&str| {
            path.strip_prefix(name.as_str()).map(|rest| rest.strip_prefix('.').unwrap_or(rest).to_owned())
        };
        let of_field = paths.iter().filter(|path| path.split('.').next() == Some(name.as_str()));
        let inner: Vec<String> = of_field.filter_map(inner).collect();
        if !inner.is_empty() && inner.iter().all(|path| !path.is_empty()) {
            keep_fields(field, &inner.iter().map(String::as_str).collect::<Vec<_>>());
        }
        !inner.is_empty()
    });
}

/// Removes the elements with names that do not match, from every list of a section.
fn retain_names(dump: &mut Value, pattern: &regex::Regex) {
    for list in dump.as_object_mut().into_iter().flat_map(Map::values_mut).filter_map(Value::as_array_mut) {
        list.retain(|item| name_of(item).is_none_or(|name| pattern.is_match(name)));
    }
}

/// Returns the name of a resource, which may be one level down.
fn name_of(item: &Value) -> Option<&str> {
    let direct = item.get("name").or_else(|| item.get("cluster_name")).and_then(Value::as_str);
    direct.or_else(|| {
        ["cluster", "listener", "route_config", "endpoint_config", "secret"].iter().find_map(|inner| {
            let inner = item.get(inner)?;
            inner.get("name").or_else(|| inner.get("cluster_name")).and_then(Value::as_str)
        })
    })
}

fn pack<M: Codec + Name>(message: &M) -> Any {
    Any { type_url: M::type_url(), value: message.to_vec() }
}

fn resource(kind: Kind, body: &Bytes) -> Option<Any> {
    Some(Any { type_url: kind.url().to_owned(), value: body.to_vec() })
}

fn timestamp(time: SystemTime) -> Option<Timestamp> {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).ok()?;
    Some(Timestamp {
        seconds: i64::try_from(since.as_secs()).ok()?,
        nanos: i32::try_from(since.subsec_nanos()).ok()?,
    })
}

fn failure(kind: Kind, failure: Option<&Failure>) -> Option<UpdateFailureState> {
    let failure = failure?;
    Some(UpdateFailureState {
        failed_configuration: resource(kind, &failure.body),
        last_update_attempt: timestamp(failure.at),
        details: failure.reason.clone(),
        version_info: failure.version.clone(),
    })
}

fn status(failed: bool) -> i32 {
    let status = if failed { ClientResourceStatus::Nacked } else { ClientResourceStatus::Acked };
    status.into()
}

fn clusters(inventory: &Inventory) -> ClustersConfigDump {
    let mut dump = ClustersConfigDump::default();
    for slot in inventory.clusters.values() {
        let dynamic = |accepted: &AcceptedResource<_>| DynamicCluster {
            version_info: accepted.version.clone(),
            cluster: resource(Kind::Cluster, &accepted.body),
            last_updated: timestamp(accepted.updated),
            error_state: failure(Kind::Cluster, slot.error.as_ref()),
            client_status: status(slot.error.is_some()),
        };
        match &slot.active {
            Some(accepted) if accepted.is_static => dump.static_clusters.push(StaticCluster {
                cluster: resource(Kind::Cluster, &accepted.body),
                last_updated: timestamp(accepted.updated),
            }),
            Some(accepted) => dump.dynamic_active_clusters.push(dynamic(accepted)),
            None => {}
        }
        dump.dynamic_warming_clusters.extend(slot.warming.as_ref().map(dynamic));
    }
    dump
}

fn listeners(inventory: &Inventory) -> ListenersConfigDump {
    let mut dump = ListenersConfigDump::default();
    for (name, slot) in &inventory.listeners {
        if let Some(accepted) = slot.active.as_ref().filter(|accepted| accepted.is_static) {
            dump.static_listeners.push(StaticListener {
                listener: resource(Kind::Listener, &accepted.body),
                last_updated: timestamp(accepted.updated),
            });
            continue;
        }
        let state = |accepted: &AcceptedResource<_>| DynamicListenerState {
            version_info: accepted.version.clone(),
            listener: resource(Kind::Listener, &accepted.body),
            last_updated: timestamp(accepted.updated),
        };
        dump.dynamic_listeners.push(DynamicListener {
            name: name.to_string(),
            active_state: slot.active.as_ref().map(state),
            warming_state: slot.warming.as_ref().map(state),
            draining_state: None,
            error_state: failure(Kind::Listener, slot.error.as_ref()),
            client_status: status(slot.error.is_some()),
        });
    }
    dump
}

fn routes(inventory: &Inventory) -> RoutesConfigDump {
    let mut dump = RoutesConfigDump::default();
    for slot in inventory.routes.values() {
        let Some(accepted) = slot.newest() else { continue };
        dump.dynamic_route_configs.push(DynamicRouteConfig {
            version_info: accepted.version.clone(),
            route_config: resource(Kind::Route, &inventory.merged_body(accepted)),
            last_updated: timestamp(accepted.updated),
            error_state: failure(Kind::Route, slot.error.as_ref()),
            client_status: status(slot.error.is_some()),
        });
    }
    for slot in inventory.listeners.values() {
        let Some(accepted) = &slot.active else { continue };
        for table in inline_tables(&accepted.body) {
            dump.static_route_configs.push(StaticRouteConfig {
                route_config: Some(table),
                last_updated: timestamp(accepted.updated),
            });
        }
    }
    dump
}

/// Returns the route tables that a listener contains inline.
fn inline_tables(listener: &Bytes) -> Vec<Any> {
    use skysail_xds::envoy::pb::envoy::{
        config::listener::v3::{Listener, filter::ConfigType},
        extensions::filters::network::http_connection_manager::v3::{
            HttpConnectionManager, http_connection_manager::RouteSpecifier,
        },
    };
    let Ok(listener) = Listener::from_slice(listener) else { return Vec::new() };
    let filters =
        listener.filter_chains.iter().chain(&listener.default_filter_chain).flat_map(|chain| &chain.filters);
    let managers = filters.filter_map(|filter| match &filter.config_type {
        Some(ConfigType::TypedConfig(any)) if any.type_url.ends_with(".HttpConnectionManager") => {
            HttpConnectionManager::from_slice(&any.value).ok()
        }
        _ => None,
    });
    let tables = managers.filter_map(|manager| match manager.route_specifier {
        Some(RouteSpecifier::RouteConfig(table)) => Some(pack(&table)),
        _ => None,
    });
    tables.collect()
}

fn endpoints(inventory: &Inventory) -> EndpointsConfigDump {
    let dynamic = inventory.assignments.values().map(|assignment| DynamicEndpointConfig {
        version_info: assignment.version.clone(),
        endpoint_config: assignment.body.as_ref().and_then(|body| resource(Kind::Endpoint, body)),
        last_updated: timestamp(assignment.updated),
        error_state: None,
        client_status: status(false),
    });
    EndpointsConfigDump { static_endpoint_configs: Vec::new(), dynamic_endpoint_configs: dynamic.collect() }
}

/// Returns certificates without their private keys, and trusted roots.
fn secrets(tls: &Arc<TlsContexts>) -> SecretsConfigDump {
    let mut dump = SecretsConfigDump::default();
    let text = |text: String| {
        Some(DataSource { specifier: Some(Specifier::InlineBytes(text.into())), ..DataSource::default() })
    };
    let mut add = |name: &SecretName, secret: Option<secret::Type>, since: Option<SystemTime>| {
        let warming = secret.is_none();
        let (name, is_static) = (&*name.name, name.source == SecretSource::Static);
        let secret = Secret { name: name.to_owned(), r#type: secret };
        if is_static && !warming {
            let (name, last_updated) = (name.to_owned(), since.and_then(timestamp));
            dump.static_secrets.push(StaticSecret { name, last_updated, secret: Some(pack(&secret)) });
            return;
        }
        let dynamic = DynamicSecret {
            name: name.to_owned(),
            version_info: String::new(),
            last_updated: since.and_then(timestamp),
            secret: Some(pack(&secret)),
            error_state: None,
            client_status: ClientResourceStatus::Unknown.into(),
        };
        if warming {
            dump.dynamic_warming_secrets.push(dynamic);
        } else {
            dump.dynamic_active_secrets.push(dynamic);
        }
    };
    for (name, identity) in tls.identities() {
        let certificate = identity.as_ref().map(|identity| {
            let chain = identity.chain().iter().map(|certificate| pem(certificate)).collect();
            secret::Type::TlsCertificate(TlsCertificate {
                certificate_chain: text(chain),
                private_key: text("[redacted]".to_owned()),
                ..TlsCertificate::default()
            })
        });
        add(&name, certificate, identity.map(|identity| identity.not_before));
    }
    for (name, roots) in tls.all_roots() {
        let context = roots.map(|roots| {
            secret::Type::ValidationContext(CertificateValidationContext {
                trusted_ca: text(roots.certificates().iter().map(|certificate| pem(certificate)).collect()),
                ..CertificateValidationContext::default()
            })
        });
        add(&name, context, None);
    }
    dump
}

fn pem(der: &[u8]) -> String {
    let base64 = STANDARD.encode(der);
    let lines: Vec<&str> =
        base64.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}
