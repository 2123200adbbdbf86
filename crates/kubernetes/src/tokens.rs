//! Service account tokens: the keys of their issuer, and the API server's review of a token.

use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use kube::{Api, api::PostParams};
use serde::Deserialize;
use tokio::time::timeout;

use crate::ApiServer;

/// Pages of the API server (OpenID Connect Discovery 1.0, section 4).
const CONFIGURATION: &str = "/.well-known/openid-configuration";
const KEYS: &str = "/openid/v1/jwks";
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The issuer of a cluster's service account tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenIssuer {
    /// Its name in tokens (claim `iss`).
    pub name: String,
    /// Its public keys as a JSON Web Key Set (RFC 7517).
    pub keys: String,
}

/// The API server's verdict on a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Review {
    /// The token is valid, and this is the name of its user, such as `system:serviceaccount:default:reviews`.
    Valid(String),
    /// The token is not valid, for this reason.
    Refused(String),
}

/// Error of a request about tokens.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// The API server refuses the request, or cannot be reached.
    #[error("the API server at {server}: {cause}")]
    Server {
        /// Address of the API server.
        server: String,
        /// Reason.
        #[source]
        cause: kube::Error,
    },
    /// The API server does not answer.
    #[error("the API server at {server} did not answer within {TIMEOUT:?}")]
    Silent {
        /// Address of the API server.
        server: String,
    },
}

/// The part of the issuer's configuration that is used.
#[derive(Deserialize)]
struct IssuerConfiguration {
    issuer: String,
}

impl ApiServer {
    /// Returns the issuer of the cluster's tokens.
    ///
    /// # Errors
    /// The API server does not serve it to this credential.
    pub async fn token_issuer(&self) -> Result<TokenIssuer, TokenError> {
        let client = self.client();
        self.limited(async {
            let page = |path| http::Request::get(path).body(Vec::new()).map_err(kube::Error::HttpError);
            let configuration: IssuerConfiguration = client.request(page(CONFIGURATION)?).await?;
            let keys = client.request_text(page(KEYS)?).await?;
            Ok(TokenIssuer { name: configuration.issuer, keys })
        })
        .await
    }

    /// Returns the API server's verdict on a token for an audience.
    ///
    /// # Errors
    /// The API server gives no verdict.
    pub async fn review(&self, token: &str, audience: &str) -> Result<Review, TokenError> {
        let spec =
            TokenReviewSpec { token: Some(token.to_owned()), audiences: Some(vec![audience.to_owned()]) };
        let review = TokenReview { spec, ..TokenReview::default() };
        let api: Api<TokenReview> = Api::all(self.client());
        let answer = self.limited(api.create(&PostParams::default(), &review)).await?;
        let status = answer.status.unwrap_or_default();
        let for_audience = || status.audiences.iter().flatten().any(|one| one == audience);
        Ok(match status.user.and_then(|user| user.username) {
            Some(name) if status.authenticated == Some(true) && for_audience() => Review::Valid(name),
            _ => Review::Refused(status.error.unwrap_or_else(|| "the token is not valid".to_owned())),
        })
    }

    /// Waits for an answer no longer than the timeout.
    async fn limited<T>(
        &self,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, TokenError> {
        let server = || self.address.clone();
        match timeout(TIMEOUT, request).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(cause)) => Err(TokenError::Server { server: server(), cause }),
            Err(_) => Err(TokenError::Silent { server: server() }),
        }
    }
}
