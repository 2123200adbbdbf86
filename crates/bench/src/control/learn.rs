//! Learns the names of endpoints and routes to which a sidecar with `--subscribe mesh` subscribes, from its clusters
//! and listeners.

use std::{collections::BTreeSet, net::SocketAddr, os::fd::AsFd as _, time::Duration};

use anyhow::ensure;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{
    connection::Connection,
    message::{Ask, Form, Kind, Response, at, names},
    sidecar::{Plan, Sidecar},
};
use crate::{
    clock,
    schedule::nanoseconds,
    stream::{Stream, Tls},
};

const HTTP_MANAGER: &[u8] =
    b"envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager";

/// Connects as the first sidecar, and stores the names of endpoints and routes in the plan.
pub(crate) fn learn(
    plan: &mut Plan,
    target: SocketAddr,
    tls: Option<&Tls>,
    patience: Duration,
) -> anyhow::Result<()> {
    let stream = Stream::open(target, tls)?;
    stream.socket().set_nonblocking(true)?;
    let mut connection = Connection::new(stream, plan.form, 1, super::AUTHORITY, u64::MAX);
    let mut message = Vec::new();
    Sidecar::new(0).begin(plan, &mut message);
    connection.send(0, &message);
    let deadline = clock::now() + nanoseconds(patience);
    let clusters = next(&mut connection, Kind::Cluster, deadline)?;
    let listeners = {
        message.clear();
        let (form, kind) = (plan.form, Kind::Listener);
        Ask { form, kind, node: b"", nonce: b"", names: b"" }.put(&mut message);
        connection.send(0, &message);
        next(&mut connection, kind, deadline)?
    };
    let resource: &[u8] = if plan.form == Form::Delta { &[2, 2] } else { &[2] };
    let (mut endpoints, mut routes) = (BTreeSet::new(), BTreeSet::new());
    for cluster in clusters.kept.iter().map(|kept| at(kept, &resource[1..])) {
        for cluster in cluster? {
            endpoints.extend(at(cluster, &[2, 3, 2])?);
        }
    }
    for listener in listeners.kept.iter().map(|kept| at(kept, &resource[1..])) {
        for listener in listener? {
            for filter in at(listener, &[2, 3, 3, 4])? {
                if at(filter, &[1])?.iter().any(|url| url.ends_with(HTTP_MANAGER)) {
                    routes.extend(at(filter, &[2, 3, 2])?);
                }
            }
        }
    }
    ensure!(!endpoints.is_empty() && !routes.is_empty(), "the control plane sends no endpoints or routes");
    plan.first_endpoints = endpoints.iter().map(|name| name.to_vec()).collect();
    let encode = |list: BTreeSet<&[u8]>| names(list.into_iter().filter_map(|name| str::from_utf8(name).ok()));
    (plan.endpoint_names, plan.route_names) = (encode(endpoints), encode(routes));
    Ok(())
}

/// Returns the next response of a type. Fails at the deadline.
fn next(connection: &mut Connection, kind: Kind, deadline: u64) -> anyhow::Result<Response> {
    let mut scratch = vec![0; 1 << 16];
    let mut found = None;
    loop {
        let all = connection.flush()?;
        let mut wanted = PollFlags::POLLIN;
        wanted.set(PollFlags::POLLOUT, !all);
        poll(&mut [PollFd::new(connection.as_fd(), wanted)], PollTimeout::from(100u8))?;
        connection.read(&mut scratch, |_, _, response| {
            if response.kind == Some(kind) {
                found = Some(response);
            }
            Ok(())
        })?;
        if let Some(found) = found {
            return Ok(found);
        }
        ensure!(clock::now() < deadline, "the control plane sends no {kind:?} in time");
    }
}
