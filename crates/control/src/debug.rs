//! Istio's debug types, which `istioctl proxy-status` and `istioctl x internal-debug` request by discovery. They show
//! the whole mesh, so [`Access`](crate::access::Access) authorizes the caller, and only the TLS port serves them.

use std::time::SystemTime;

use serde_json::json;
use skysail_model::ProxyView;
use skysail_xds::{
    Kind,
    envoy::pb::{
        envoy::{
            admin::v3::{BootstrapConfigDump, UpdateFailureState},
            config::core::v3::{ControlPlane, Node},
            service::{
                discovery::v3::DiscoveryResponse,
                status::v3::{ClientConfig, ConfigStatus, client_config::GenericXdsConfig},
            },
        },
        google::protobuf::{Any, Struct, Timestamp, value},
    },
    istio::{pack, string, structure},
    server::DebugRequest,
};
use tonic::Status;

use crate::{
    admin::Pages,
    config_dump::{clusters, listeners, of_kind, tables},
    publish::{ClientStatus, Publisher, TypeStatus},
};

const SYNCZ: &str = "istio.io/debug/syncz";
const CONFIG_DUMP: &str = "istio.io/debug/config_dump";
const CONNECTIONS: &str = "istio.io/connections";
/// Type of the pages below `/debug`; the resource name is that of the page.
const PAGE: &str = "istio.io/debug";
/// Istiod's message for an unknown page. `istioctl` then lists the pages.
const UNKNOWN: &str = "404 page not found";

/// Returns the response to an authorized request.
pub(crate) fn response(debug_request: &DebugRequest, pages: &Pages) -> Result<DiscoveryResponse, Status> {
    let publisher = &*pages.publisher;
    let DebugRequest { type_url, names } = debug_request;
    let resources = match (type_url.as_str(), names.as_slice()) {
        (SYNCZ, _) => {
            publisher.proxies().iter().map(|(view, status)| pack(&client_config(view, status))).collect()
        }
        (CONNECTIONS, _) => {
            publisher.proxies().iter().map(|(view, status)| pack(&node(view, status))).collect()
        }
        (PAGE, [name]) => {
            vec![Any { type_url: PAGE.to_owned(), value: page(name, pages)?.into_bytes() }]
        }
        (CONFIG_DUMP, [proxy]) => config_dump(publisher, proxy)?,
        (CONFIG_DUMP | PAGE, _) => {
            return Err(Status::invalid_argument(format!("{type_url} takes exactly one name")));
        }
        (url, _) => match url.strip_prefix("istio.io/debug/config_dump?proxyID=") {
            Some(proxy) => config_dump(publisher, proxy)?,
            None => return Err(Status::invalid_argument(format!("unknown debug type {url}"))),
        },
    };
    Ok(DiscoveryResponse { resources, control_plane: Some(control_plane()), ..DiscoveryResponse::default() })
}

/// Returns the description of this control plane in istiod's form, for the columns of `istioctl`.
fn control_plane() -> ControlPlane {
    let id = std::env::var("POD_NAME")
        .or_else(|_| std::env::var("HOSTNAME"))
        .unwrap_or_else(|_| "skysaild".into());
    let info = json!({"version": env!("CARGO_PKG_VERSION"), "status": "Skysail"});
    ControlPlane { identifier: json!({"Component": "skysaild", "ID": id, "Info": info}).to_string() }
}

fn page(name: &str, pages: &Pages) -> Result<String, Status> {
    match name {
        "connections" => {
            let clients: Vec<_> = pages
                .publisher
                .proxies()
                .iter()
                .map(|(_, status)| {
                    json!({"connectionId": format!("{}-{}", status.proxy, status.connection), "address": status.address})
                })
                .collect();
            Ok(json!({"totalClients": clients.len(), "clients": clients}).to_string())
        }
        name => pages.json(name).unwrap_or_else(|| Ok(UNKNOWN.to_owned())),
    }
    .map_err(|error: serde_json::Error| Status::internal(error.to_string()))
}

fn node(view: &ProxyView, status: &ClientStatus) -> Node {
    let fields = [
        ("CLUSTER_ID", string(&view.cluster_id)),
        ("NAMESPACE", string(&view.namespace)),
        ("ISTIO_VERSION", string(&status.version)),
    ];
    let metadata = match structure(fields).kind {
        Some(value::Kind::StructValue(fields)) => Some(fields),
        _ => None::<Struct>,
    };
    Node { id: status.proxy.clone(), metadata, ..Node::default() }
}

/// Returns the status of a proxy in the form of Envoy's client status discovery service (CSDS).
fn client_config(view: &ProxyView, status: &ClientStatus) -> ClientConfig {
    let configs = status.types().map(|(kind, of)| {
        let updated = of.sent_at.map(timestamp);
        let config_status = match of {
            TypeStatus { synced: true, .. } => ConfigStatus::Synced,
            TypeStatus { error, .. } if error.is_empty() => ConfigStatus::Stale,
            _ => ConfigStatus::Error,
        };
        let failure = || UpdateFailureState {
            last_update_attempt: updated,
            details: of.error.clone(),
            ..UpdateFailureState::default()
        };
        GenericXdsConfig {
            type_url: kind.url().to_owned(),
            config_status: config_status.into(),
            last_updated: updated,
            error_state: (!of.error.is_empty()).then(failure),
            ..GenericXdsConfig::default()
        }
    });
    ClientConfig {
        node: Some(node(view, status)),
        generic_xds_configs: configs.collect(),
        ..ClientConfig::default()
    }
}

fn timestamp(time: SystemTime) -> Timestamp {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Timestamp {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(since.subsec_nanos()).unwrap_or_default(),
    }
}

/// Returns the clusters, listeners and routes of a proxy as messages of Envoy's config dump, without secrets.
fn config_dump(publisher: &Publisher, proxy: &str) -> Result<Vec<Any>, Status> {
    let snapshot = publisher.resources_of(proxy).ok_or_else(|| {
        Status::not_found(format!(
            "no proxy {proxy} is connected to this control plane; use POD.NAMESPACE or a node id"
        ))
    })?;
    let routes = of_kind(&snapshot, Kind::Route).map(|(_, route)| route);
    Ok(vec![
        pack(&BootstrapConfigDump::default()),
        pack(&clusters(&snapshot)),
        pack(&listeners(&snapshot)),
        pack(&tables(routes)),
    ])
}
