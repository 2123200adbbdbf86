//! Information about the request and its connection, and dynamic metadata.

use std::{net::SocketAddr, rc::Rc, sync::Arc};

use mlua::{UserData, UserDataMethods, Value};
use serde_json::{Map, Value as Json};
use skysail_policy::peer::Peer;

use super::{
    MAX_ADDED,
    stream::{SharedStream, live},
    values,
};

/// Information about a request that does not change.
pub(crate) struct Info {
    pub(crate) protocol: &'static str,
    pub(crate) route_name: Arc<str>,
    pub(crate) local: SocketAddr,
    pub(crate) direct_local: SocketAddr,
    pub(crate) remote: SocketAddr,
    pub(crate) direct_remote: SocketAddr,
    pub(crate) server_name: Option<String>,
    pub(crate) peer: Rc<Peer>,
}

/// `handle:streamInfo()`.
pub(super) struct StreamInfo(pub(super) SharedStream);

impl UserData for StreamInfo {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        type Get = fn(&Info) -> String;
        let texts: [(&str, Get); 7] = [
            ("protocol", |info| info.protocol.to_owned()),
            ("routeName", |info| info.route_name.to_string()),
            ("downstreamLocalAddress", |info| info.local.to_string()),
            ("downstreamDirectLocalAddress", |info| info.direct_local.to_string()),
            ("downstreamRemoteAddress", |info| info.remote.to_string()),
            ("downstreamDirectRemoteAddress", |info| info.direct_remote.to_string()),
            ("requestedServerName", |info| info.server_name.clone().unwrap_or_default()),
        ];
        for (name, get) in texts {
            methods.add_method(name, move |_, Self(stream), ()| Ok(get(&live(stream)?.info)));
        }
        methods.add_method("dynamicMetadata", |_, Self(stream), ()| Ok(DynamicMetadata(stream.clone())));
        methods.add_method("downstreamSslConnection", |_, Self(stream), ()| secured(stream));
        for name in ["virtualClusterName", "dynamicTypedMetadata", "filterState"] {
            methods.add_method(name, move |_, _, _: Value| -> mlua::Result<()> {
                Err(mlua::Error::runtime(format!("skysail-proxy does not support {name}()")))
            });
        }
    }
}

/// `handle:connection()`.
pub(super) struct ConnectionInfo(pub(super) SharedStream);

impl UserData for ConnectionInfo {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("ssl", |_, Self(stream), ()| secured(stream));
    }
}

/// A TLS connection.
struct LuaTlsConnection(SharedStream);

/// Returns the TLS connection; `None` without TLS.
fn secured(stream: &SharedStream) -> mlua::Result<Option<LuaTlsConnection>> {
    Ok(live(stream)?.info.peer.tls.then(|| LuaTlsConnection(stream.clone())))
}

impl UserData for LuaTlsConnection {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        // Handshakes accept no certificate without verification.
        for name in ["peerCertificatePresented", "peerCertificateValidated"] {
            methods.add_method(name, |_, Self(stream), ()| Ok(live(stream)?.info.peer.certificate.is_some()));
        }
        type Get = fn(&Peer) -> Option<String>;
        let texts: [(&str, Get); 3] = [
            ("subjectPeerCertificate", |peer| Some(peer.names()?.subject.clone())),
            ("sha256PeerCertificateDigest", |peer| Some(peer.certificate.as_ref()?.fingerprint.to_string())),
            ("urlEncodedPemEncodedPeerCertificate", Peer::certificate_pem),
        ];
        for (name, get) in texts {
            methods.add_method(name, move |_, Self(stream), ()| {
                Ok(get(&live(stream)?.info.peer).unwrap_or_default())
            });
        }
        type List = fn(&Peer) -> Vec<String>;
        let lists: [(&str, List); 3] = [
            ("uriSanPeerCertificate", |peer| {
                peer.names().map(|names| names.uris.clone()).unwrap_or_default()
            }),
            ("dnsSansPeerCertificate", |peer| {
                peer.names().map(|names| names.dns.clone()).unwrap_or_default()
            }),
            ("uriSanLocalCertificate", |peer| peer.local_principal.iter().map(ToString::to_string).collect()),
        ];
        for (name, get) in lists {
            methods.add_method(name, move |_, Self(stream), ()| Ok(get(&live(stream)?.info.peer)));
        }
    }
}

/// `streamInfo():dynamicMetadata()`.
struct DynamicMetadata(SharedStream);

impl UserData for DynamicMetadata {
    fn add_methods<M: UserDataMethods<Self>>(methods: &mut M) {
        methods.add_method("get", |lua, Self(stream), filter: String| {
            let stream = live(stream)?;
            stream.metadata.get(&filter).map_or(Ok(Value::Nil), |value| values::to_lua(lua, value))
        });
        methods.add_method("set", |_, Self(stream), (filter, key, value): (String, String, Value)| {
            let mut stream = live(stream)?;
            let mut room = MAX_ADDED.saturating_sub(stream.added_size + filter.len() + key.len());
            let value = values::to_json(&value, &mut room, 0)?;
            stream.added_size = MAX_ADDED - room;
            insert(&mut stream.metadata, &filter, &key, value.clone());
            insert(&mut stream.added, &filter, &key, value);
            Ok(())
        });
        methods
            .add_method("__entries", |lua, Self(stream), ()| values::entries(lua, &live(stream)?.metadata));
    }
}

fn insert(metadata: &mut Map<String, Json>, filter: &str, key: &str, value: Json) {
    if let Json::Object(known) = metadata.entry(filter).or_insert_with(|| Map::new().into()) {
        known.insert(key.to_owned(), value);
    }
}
