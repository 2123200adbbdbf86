//! `customer`: the travellers, their addresses and their miles.
//!
//! `/customer/internal/` is for other services only; an AuthorizationPolicy of the mesh enforces this.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use axum::{
    Form, Json, Router,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{service::Failure, token::Key};

/// Number of customers at the start: uid0@email.com and so on, password "password".
const INITIAL_CUSTOMERS: u32 = 1000;
const MAX_LOADED: u32 = 1_000_000;

#[derive(Clone)]
struct Customers {
    key: Key,
    all: Arc<Mutex<HashMap<String, Customer>>>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Customer {
    id: String,
    #[serde(skip)]
    password: String,
    status: &'static str,
    total_miles: i64,
    miles_ytd: i64,
    address: Address,
    phone_number: String,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Address {
    street_address1: String,
    city: String,
    country: String,
    postal_code: String,
}

#[derive(Deserialize)]
struct Credentials {
    login: String,
    password: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Update {
    password: String,
    phone_number: String,
    address: Address,
}

#[derive(Deserialize)]
struct Miles {
    miles: i64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Load {
    num_customers: u32,
}

/// Returns the routes, with a new store of customers.
pub(crate) fn router(key: Key) -> Router {
    let customers = Customers { key, all: Arc::default() };
    customers.load(INITIAL_CUSTOMERS);
    Router::new()
        .route("/customer/byid/{id}", get(by_id).post(update))
        .route("/customer/internal/validateid", post(validate))
        .route("/customer/internal/updateCustomerTotalMiles/{id}", post(add_miles))
        .route("/customer/loader/load", get(load))
        .route("/customer/config/countCustomers", get(count))
        .with_state(customers)
}

async fn by_id(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Customer>, Failure> {
    customers.key.caller_is(&headers, &id)?;
    customers.with(&id, |customer| customer.clone()).map(Json)
}

/// Changes address and phone number. The request must have the password, which does not change.
async fn update(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(update): Json<Update>,
) -> Result<Json<Customer>, Failure> {
    customers.key.caller_is(&headers, &id)?;
    customers
        .with(&id, |customer| {
            if customer.password != update.password {
                return Err(Failure::new(StatusCode::FORBIDDEN, "wrong password"));
            }
            customer.phone_number = update.phone_number;
            customer.address = update.address;
            Ok(customer.clone())
        })?
        .map(Json)
}

async fn validate(
    State(customers): State<Customers>,
    Form(given): Form<Credentials>,
) -> Result<Json<Value>, Failure> {
    match customers.with(&given.login, |customer| customer.password == given.password) {
        Ok(true) => Ok(Json(json!({ "validCustomer": true }))),
        _ => Err(Failure::new(StatusCode::UNAUTHORIZED, "unknown customer or wrong password")),
    }
}

async fn add_miles(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    Form(add): Form<Miles>,
) -> Result<Json<Value>, Failure> {
    let total = customers.with(&id, |customer| {
        customer.total_miles = customer.total_miles.saturating_add(add.miles);
        customer.miles_ytd = customer.miles_ytd.saturating_add(add.miles);
        customer.total_miles
    })?;
    Ok(Json(json!({ "total_miles": total })))
}

/// Replaces the store by one with this number of customers.
async fn load(State(customers): State<Customers>, Query(load): Query<Load>) -> Result<String, Failure> {
    if load.num_customers > MAX_LOADED {
        return Err(Failure::bad_request(format!("numCustomers: at most {MAX_LOADED}")));
    }
    customers.load(load.num_customers);
    Ok(format!("loaded {} customers\n", load.num_customers))
}

async fn count(State(customers): State<Customers>) -> String {
    customers.lock().len().to_string()
}

impl Customers {
    fn load(&self, number: u32) {
        *self.lock() = (0..number).map(|n| (format!("uid{n}@email.com"), Customer::numbered(n))).collect();
    }

    fn with<T>(&self, id: &str, act: impl FnOnce(&mut Customer) -> T) -> Result<T, Failure> {
        self.lock().get_mut(id).map(act).ok_or_else(|| Failure::not_found(format!("no customer {id}")))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Customer>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Customer {
    fn numbered(n: u32) -> Self {
        Self {
            id: format!("uid{n}@email.com"),
            password: "password".to_owned(),
            status: "GOLD",
            total_miles: 1_000_000,
            miles_ytd: 1000,
            address: Address {
                street_address1: format!("{n} Main St."),
                city: "Anytown".to_owned(),
                country: "USA".to_owned(),
                postal_code: "27617".to_owned(),
            },
            phone_number: "919-123-4567".to_owned(),
        }
    }
}
