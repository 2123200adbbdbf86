//! `auth`: verifies a password with `customer`, then signs a token.

use axum::{
    Form, Json, Router,
    extract::State,
    http::{HeaderMap, Method, StatusCode},
    routing::post,
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    peers::{Client, Peer, propagated_headers},
    service::Failure,
    token::Key,
};

#[derive(Clone)]
struct Auth {
    key: Key,
    customer: Peer,
    client: Client,
}

#[derive(Deserialize)]
struct Login {
    login: String,
    password: String,
}

/// Returns the route `POST /auth/login` with form fields `login` and `password`. The response is
/// `{"token": …, "loggedinuser": …}`.
pub(crate) fn router(key: Key, customer: Peer) -> Router {
    Router::new().route("/auth/login", post(login)).with_state(Auth { key, customer, client: Client::new() })
}

async fn login(
    State(auth): State<Auth>,
    headers: HeaderMap,
    Form(login): Form<Login>,
) -> Result<Json<Value>, Failure> {
    let fields = [("login", login.login.as_str()), ("password", login.password.as_str())];
    let answer = auth
        .client
        .call(
            Method::POST,
            &auth.customer,
            "/customer/internal/validateid",
            propagated_headers(&headers),
            &fields,
        )
        .await
        .map_err(|error| Failure::new(StatusCode::BAD_GATEWAY, error))?;
    match answer.status {
        StatusCode::OK => {
            Ok(Json(json!({ "token": auth.key.sign(&login.login)?, "loggedinuser": login.login })))
        }
        StatusCode::UNAUTHORIZED => {
            Err(Failure::new(StatusCode::UNAUTHORIZED, "unknown customer or wrong password"))
        }
        other => Err(Failure::new(StatusCode::BAD_GATEWAY, format!("customer answered {other}"))),
    }
}
