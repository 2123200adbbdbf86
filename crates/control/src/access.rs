//! Access to the admin pages: for callers in the control plane's own network namespace, and for service accounts on the allow list.

use std::{collections::BTreeSet, fmt, str::FromStr, sync::Arc};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use skysail_admin::Ends;
use skysail_core::{SpiffeId, local::Refusal, names::TOKEN_AUDIENCE};
use tonic::Status;

use crate::{
    audit::{Audit, Event, Text},
    authentication::{Authentication, bearer},
    metrics::{Metrics, count},
};

/// A service account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Account {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
}

impl FromStr for Account {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // RFC 1123 names; the accounts' may have dots.
        let is_name = |name: &str| {
            !name.is_empty()
                && name
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'.')
        };
        match text.split_once('/') {
            Some((namespace, name)) if is_name(namespace) && is_name(name) => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err("write NAMESPACE/SERVICEACCOUNT, such as monitoring/kiali".to_owned()),
        }
    }
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Authorizes callers.
pub(crate) struct Access {
    authentication: Arc<Authentication>,
    allowed: BTreeSet<Account>,
    metrics: Arc<Metrics>,
    audit: Arc<Audit>,
}

impl Access {
    pub(crate) fn new(
        authentication: Arc<Authentication>,
        allowed: Vec<Account>,
        metrics: Arc<Metrics>,
        audit: Arc<Audit>,
    ) -> Self {
        Self { authentication, allowed: allowed.into_iter().collect(), metrics, audit }
    }

    /// Whether the allow list has a service account.
    pub(crate) fn allows(&self, id: &SpiffeId) -> bool {
        let account = Account { namespace: id.namespace.clone(), name: id.service_account.clone() };
        self.allowed.contains(&account)
    }

    /// Checks that a service account may ask Istio's debug types: those of the allow list, and `default` of the root namespace, as
    /// which `istioctl` asks.
    ///
    /// # Errors
    /// When it may not.
    pub(crate) fn check_debug(&self, id: &SpiffeId, root_namespace: &str) -> Result<(), Status> {
        let SpiffeId { namespace, service_account, .. } = id;
        if self.allows(id) || (namespace == root_namespace && service_account == "default") {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "debug types show all of the mesh, and {id} is none of those who may see it: {root_namespace}/default and the service \
             accounts of --admin-allow; give skysaild --admin-allow {namespace}/{service_account} to let it in"
        )))
    }

    /// Admits callers of the own network namespace, and readers with a token. Returns the identity of a reader.
    fn check(&self, ends: Ends, request: &Request) -> Result<Option<SpiffeId>, (StatusCode, String)> {
        match ends.check(request) {
            Ok(()) => Ok(None),
            Err(Refusal::Elsewhere) if !request.method().is_safe() => {
                let said = "changes are accepted from the control plane's own machine or pod only, for example by port forwarding";
                Err((StatusCode::FORBIDDEN, said.to_owned()))
            }
            Err(Refusal::Elsewhere) => self.check_token(request.headers()).map(Some),
            Err(refusal) => Err((StatusCode::FORBIDDEN, refusal.to_string())),
        }
    }

    fn check_token(&self, headers: &HeaderMap) -> Result<SpiffeId, (StatusCode, String)> {
        let refused = |status, said| {
            count(&self.metrics.authentication_failures);
            (status, said)
        };
        let unauthorized = |status: Status| refused(StatusCode::UNAUTHORIZED, status.message().to_owned());
        let token = bearer(headers).map_err(unauthorized)?;
        let token = token.ok_or_else(|| refused(StatusCode::UNAUTHORIZED, missing()))?;
        let id = self.authentication.by_token(token).map_err(unauthorized)?.id;
        if self.allows(&id) {
            return Ok(id);
        }
        let SpiffeId { namespace, service_account, .. } = id;
        let said = format!(
            "give skysaild --admin-allow {namespace}/{service_account} to let this service account in"
        );
        Err(refused(StatusCode::FORBIDDEN, said))
    }
}

/// Message that says how to get access.
fn missing() -> String {
    format!(
        "this page is served to callers on the control plane's own machine or in its pod, for example by port forwarding, and to the \
         service accounts of --admin-allow, whose token (audience {TOKEN_AUDIENCE}) is sent as Authorization: Bearer TOKEN; \
         /ready and /metrics are open"
    )
}

/// Refuses callers without access, and records actions, refusals and remote reads in the audit log.
pub(crate) async fn guard(
    State(access): State<Arc<Access>>,
    ConnectInfo(ends): ConnectInfo<Ends>,
    request: Request,
    next: Next,
) -> Response {
    let (path, address) = (request.uri().path().to_owned(), ends.remote.to_canonical().to_string());
    let (page, address) = (Text(&path), Text(&address));
    match access.check(ends, &request) {
        Ok(reader) => {
            if let Some(id) = reader {
                let identity = id.to_string();
                access.audit.record(Event::AdminRead { address, identity: Text(&identity), page });
            }
            let is_action = !request.method().is_safe();
            let response = next.run(request).await;
            if is_action {
                let status = response.status().as_u16();
                access.audit.record(Event::AdminAction { address, page, status });
            }
            response
        }
        Err((status, said)) => {
            access.audit.record(Event::AdminRefused { address, page, reason: Text(&said), suppressed: 0 });
            let mut response = (status, said + "\n").into_response();
            if status == StatusCode::UNAUTHORIZED {
                let challenge = header::HeaderValue::from_static("Bearer");
                response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
            }
            response
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accounts_are_written_with_their_namespace() {
        let account: Account = "monitoring/kiali".parse().unwrap();
        assert_eq!(account.to_string(), "monitoring/kiali");
        for wrong in ["", "kiali", "/kiali", "monitoring/", "a/b/c", "*/kiali", "Monitoring/kiali"] {
            assert!(wrong.parse::<Account>().is_err(), "{wrong}");
        }
    }
}
