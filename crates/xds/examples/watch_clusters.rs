//! Subscribes to clusters, their endpoints and all listeners at an xDS server, and prints changes: `watch_clusters
//! http://127.0.0.1:15010 NODE-ID [sotw]`.

use skysail_xds::{
    Kind,
    client::{BoxError, Client, Connection, Form, Options, Rejection, Subscriptions, Update},
    envoy::pb::envoy::config::{
        cluster::v3::{Cluster, cluster::ClusterDiscoveryType},
        core::v3::Node,
    },
};
use tonic::transport::Endpoint;

/// `Cluster.DiscoveryType.EDS`
const EDS: i32 = 3;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: watch_clusters URL NODE-ID [sotw]";
    let endpoint = Endpoint::from_shared(arguments.next().ok_or(usage)?)?;
    let node = Node { id: arguments.next().ok_or(usage)?, ..Node::default() };
    let form = if arguments.next().as_deref() == Some("sotw") { Form::Sotw } else { Form::Delta };
    let (client, subscriptions) =
        Client::new(Options { node, form, wildcard: vec![Kind::Cluster, Kind::Listener] });
    let connect = async || Ok(Connection::new(endpoint.connect().await?));
    match client.run(connect, async |update| apply(&subscriptions, update)).await {}
}

/// Prints an update and subscribes to the endpoints of new clusters.
fn apply(subscriptions: &Subscriptions, update: Update) -> Vec<Rejection> {
    let mut rejections = Vec::new();
    for resource in &update.added {
        println!("{} + {} {}", update.kind, resource.name, resource.version);
        if update.kind != Kind::Cluster {
            continue;
        }
        match resource.decode::<Cluster>() {
            Ok(cluster) if cluster.cluster_discovery_type == Some(ClusterDiscoveryType::Type(EDS)) => {
                subscriptions.subscribe(Kind::Endpoint, [resource.name.as_str()]);
            }
            Ok(_) => {}
            Err(error) => {
                rejections.push(Rejection { name: resource.name.clone(), reason: error.to_string() });
            }
        }
    }
    for name in &update.removed {
        println!("{} - {name}", update.kind);
        if update.kind == Kind::Cluster {
            subscriptions.unsubscribe(Kind::Endpoint, [name.as_str()]);
        }
    }
    rejections
}
