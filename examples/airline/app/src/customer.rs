//! `customer`: the travellers, their addresses and their miles.
//!
//! `/customer/internal/` is for other services only; an AuthorizationPolicy of the mesh enforces this.

use axum::{
    Form, Json, Router,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    routing::{get, post},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{service::Failure, store::Store, token::Key};

/// Number of customers at the start: uid0@email.com and so on, password "password".
const INITIAL_CUSTOMERS: u32 = 1000;
const MAX_LOADED: u32 = 1_000_000;

#[derive(Clone)]
struct Customers {
    key: Key,
    all: Store,
}

/// A customer in the database.
#[derive(Serialize, Deserialize)]
struct StoredCustomer {
    password: String,
    #[serde(flatten)]
    customer: Customer,
}

/// A customer in responses.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Customer {
    id: String,
    status: String,
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

/// Returns the routes. An empty database gets the initial customers.
pub(crate) async fn router(key: Key, all: Store) -> Result<Router, Failure> {
    let customers = Customers { key, all };
    if customers.all.count().await? == 0 {
        customers.load(INITIAL_CUSTOMERS).await?;
    }
    let routes = Router::new()
        .route("/customer/byid/{id}", get(by_id).post(update))
        .route("/customer/internal/validateid", post(validate))
        .route("/customer/internal/updateCustomerTotalMiles/{id}", post(add_miles))
        .route("/customer/loader/load", get(load))
        .route("/customer/config/countCustomers", get(count))
        .with_state(customers);
    Ok(routes)
}

async fn by_id(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Customer>, Failure> {
    customers.key.caller_is(&headers, &id)?;
    customers.get(&id).await.map(|stored| Json(stored.customer))
}

/// Changes address and phone number. The request must have the password, which does not change.
async fn update(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    headers: HeaderMap,
    Json(update): Json<Update>,
) -> Result<Json<Customer>, Failure> {
    customers.key.caller_is(&headers, &id)?;
    let changed = customers.update(&id, |stored| {
        if stored.password != update.password {
            return Err(Failure::new(StatusCode::FORBIDDEN, "wrong password"));
        }
        stored.customer.phone_number.clone_from(&update.phone_number);
        stored.customer.address.clone_from(&update.address);
        Ok(stored.customer.clone())
    });
    changed.await.map(Json)
}

async fn validate(
    State(customers): State<Customers>,
    Form(given): Form<Credentials>,
) -> Result<Json<Value>, Failure> {
    let stored: Option<StoredCustomer> = customers.all.get(&given.login).await?;
    match stored {
        Some(stored) if stored.password == given.password => Ok(Json(json!({ "validCustomer": true }))),
        _ => Err(Failure::new(StatusCode::UNAUTHORIZED, "unknown customer or wrong password")),
    }
}

async fn add_miles(
    State(customers): State<Customers>,
    Path(id): Path<String>,
    Form(add): Form<Miles>,
) -> Result<Json<Value>, Failure> {
    let total = customers.update(&id, |StoredCustomer { customer, .. }| {
        customer.total_miles = customer.total_miles.saturating_add(add.miles);
        customer.miles_ytd = customer.miles_ytd.saturating_add(add.miles);
        Ok(customer.total_miles)
    });
    Ok(Json(json!({ "total_miles": total.await? })))
}

/// Replaces all customers by this number of new ones.
async fn load(State(customers): State<Customers>, Query(load): Query<Load>) -> Result<String, Failure> {
    if load.num_customers > MAX_LOADED {
        return Err(Failure::bad_request(format!("numCustomers: at most {MAX_LOADED}")));
    }
    customers.load(load.num_customers).await?;
    Ok(format!("loaded {} customers\n", load.num_customers))
}

async fn count(State(customers): State<Customers>) -> Result<String, Failure> {
    Ok(customers.all.count().await?.to_string())
}

impl Customers {
    async fn load(&self, number: u32) -> Result<(), Failure> {
        let stored = |n: u32| {
            let customer = Customer::numbered(n);
            (customer.id.clone(), StoredCustomer { password: "password".to_owned(), customer })
        };
        self.all.load((0..number).map(stored).collect()).await
    }

    async fn get(&self, id: &str) -> Result<StoredCustomer, Failure> {
        self.all.get(id).await?.ok_or_else(|| unknown(id))
    }

    async fn update<R>(
        &self,
        id: &str,
        change: impl Fn(&mut StoredCustomer) -> Result<R, Failure>,
    ) -> Result<R, Failure> {
        self.all.update(id, change).await?.ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> Failure {
    Failure::not_found(format!("no customer {id}"))
}

impl Customer {
    fn numbered(n: u32) -> Self {
        Self {
            id: format!("uid{n}@email.com"),
            status: "GOLD".to_owned(),
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
