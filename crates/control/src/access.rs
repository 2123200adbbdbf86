//! Access to the admin pages: for callers in the control plane's own network namespace. The service accounts of
//! `--admin-allow` may read the pages from elsewhere.

use std::{collections::BTreeSet, fmt, str::FromStr, sync::Arc};

use axum::{
    extract::{ConnectInfo, Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    middleware::Next,
    response::{IntoResponse as _, Response},
};
use skysail_admin::ConnectionAddresses;
use skysail_core::{SpiffeId, local::Refusal, names::TOKEN_AUDIENCE};
use tonic::Status;

use crate::{
    audit::{AuditEvent, AuditLog, ExternalText},
    authentication::{Authentication, bearer},
    metrics::{Metrics, count},
};

/// A Kubernetes service account.
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
        // RFC 1123 names; those of service accounts may contain dots.
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

/// Authorizes callers of the admin pages.
pub(crate) struct Access {
    authentication: Arc<Authentication>,
    allowed: BTreeSet<Account>,
    metrics: Arc<Metrics>,
    audit: Arc<AuditLog>,
}

impl Access {
    pub(crate) fn new(
        authentication: Arc<Authentication>,
        allowed: Vec<Account>,
        metrics: Arc<Metrics>,
        audit: Arc<AuditLog>,
    ) -> Self {
        Self { authentication, allowed: allowed.into_iter().collect(), metrics, audit }
    }

    /// Returns whether `--admin-allow` lists a service account. The trust domain was checked before.
    pub(crate) fn allows(&self, id: &SpiffeId) -> bool {
        let account = Account { namespace: id.namespace.clone(), name: id.service_account.clone() };
        self.allowed.contains(&account)
    }

    /// Authorizes a service account for Istio's debug types: those of `--admin-allow`, and `default` of the root
    /// namespace, which `istioctl` uses.
    ///
    /// # Errors
    /// When the service account is not authorized.
    pub(crate) fn check_debug(&self, id: &SpiffeId, root_namespace: &str) -> Result<(), Status> {
        let SpiffeId { namespace, service_account, .. } = id;
        if self.allows(id) || (namespace == root_namespace && service_account == "default") {
            return Ok(());
        }
        Err(Status::permission_denied(format!(
            "{id} may not read debug types, which show the whole mesh; to allow it, start skysaild with --admin-allow \
             {namespace}/{service_account}; {root_namespace}/default is always allowed"
        )))
    }

    /// Authorizes callers in the own network namespace (`local`), and reads with a token. Returns the identity of a caller
    /// with a token.
    async fn check(
        &self,
        local: Result<(), Refusal>,
        method: &Method,
        headers: &HeaderMap,
    ) -> Result<Option<SpiffeId>, (StatusCode, String)> {
        match local {
            Ok(()) => Ok(None),
            Err(Refusal::Elsewhere) if !method.is_safe() => {
                let message = "changes are accepted from the control plane's own machine or pod only; use port forwarding";
                Err((StatusCode::FORBIDDEN, message.to_owned()))
            }
            Err(Refusal::Elsewhere) => self.check_token(headers).await.map(Some),
            Err(refusal) => Err((StatusCode::FORBIDDEN, refusal.to_string())),
        }
    }

    async fn check_token(&self, headers: &HeaderMap) -> Result<SpiffeId, (StatusCode, String)> {
        let refused = |status, message| {
            count(&self.metrics.authentication_failures);
            (status, message)
        };
        let unauthorized = |status: Status| refused(StatusCode::UNAUTHORIZED, status.message().to_owned());
        let token = bearer(headers).map_err(unauthorized)?;
        let token = token.ok_or_else(|| refused(StatusCode::UNAUTHORIZED, token_required()))?;
        let id = self.authentication.verify_token(token).map_err(unauthorized)?.id;
        if self.allows(&id) {
            self.authentication.confirm_token(token, &id).await.map_err(unauthorized)?;
            return Ok(id);
        }
        let SpiffeId { namespace, service_account, .. } = id;
        let message = format!(
            "this service account may not read the page; to allow it, start skysaild with --admin-allow {namespace}/{service_account}"
        );
        Err(refused(StatusCode::FORBIDDEN, message))
    }
}

/// Returns the message for a caller without a token.
fn token_required() -> String {
    format!(
        "this page needs a caller on the control plane's own machine or in its pod (for example by port forwarding), or the token of a \
         service account of --admin-allow (audience {TOKEN_AUDIENCE}) as Authorization: Bearer TOKEN; /ready and /metrics are open"
    )
}

/// Middleware that refuses callers without access, and records actions, refusals and reads with a token in the audit
/// log.
pub(crate) async fn guard(
    State(access): State<Arc<Access>>,
    ConnectInfo(ends): ConnectInfo<ConnectionAddresses>,
    request: Request,
    next: Next,
) -> Response {
    // The query may name the proxy whose configuration is read.
    let path = request.uri().path_and_query().map(ToString::to_string).unwrap_or_default();
    let address = ends.remote.to_canonical().to_string();
    let (page, address) = (ExternalText(&path), ExternalText(&address));
    let local = ends.check(&request);
    match access.check(local, request.method(), request.headers()).await {
        Ok(reader) => {
            if let Some(id) = reader {
                let identity = id.to_string();
                access.audit.record(AuditEvent::AdminRead {
                    address,
                    identity: ExternalText(&identity),
                    page,
                });
            }
            let is_action = !request.method().is_safe();
            let response = next.run(request).await;
            if is_action {
                let status = response.status().as_u16();
                access.audit.record(AuditEvent::AdminAction { address, page, status });
            }
            response
        }
        Err((status, message)) => {
            access.audit.record(AuditEvent::AdminRefused {
                address,
                page,
                reason: ExternalText(&message),
                suppressed: 0,
            });
            let mut response = (status, message + "\n").into_response();
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
    fn an_account_is_parsed_from_namespace_and_name() {
        let account: Account = "monitoring/kiali".parse().unwrap();
        assert_eq!(account.to_string(), "monitoring/kiali");
        for wrong in ["", "kiali", "/kiali", "monitoring/", "a/b/c", "*/kiali", "Monitoring/kiali"] {
            assert!(wrong.parse::<Account>().is_err(), "{wrong}");
        }
    }
}
