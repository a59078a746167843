"""Usual names of columns in English, German, French, Spanish, Portuguese, Italian, Dutch, Polish.

Names are compared without case, accents, blanks and signs (`normalised`). Many are composed, as
`Codice cliente`, `Kunden-Nr.` and `Date de la commande` are. A role has up to four groups of names,
the surest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from recsys.event_names import normalised

USERS = (
    "customer client user visitor buyer shopper member reviewer borrower patron subscriber viewer"
    " listener person cust kunde kunden benutzer nutzer besucher kaeufer kaufer kd"
    " utilisateur acheteur visiteur cliente usuario comprador utente acquirente utilizador"
    " klant gebruiker klient klienta"
)
ITEMS = (
    "item product prod sku article movie book track song artist video"
    " artikel art produkt produktu produit producto articulo prodotto articolo produto artigo towar"
    " towaru"
)
LINES = "items products lines lineitem lineitems"
ORDERS = (
    "order invoice basket cart transaction receipt ticket bestellung bestell auftrag auftrags"
    " rechnung rechnungs beleg bon commande facture pedido factura encomenda ordine fattura"
    " bestelling bestel factuur zamowienie zamowienia"
)
OCCASIONS = (
    "event purchase review loan issue checkout kauf ausleih achat emprunt compra prestamo acquisto"
    " prestito aankoop"
)
EVENTS = (
    "event behavior behaviour action interaction aktion aktions ereignis evenement evento accion"
    " azione gebeurtenis actie"
)
IDS = (
    "id nr no n num number numero nummer numer code codigo codice kod cod key ref reference"
    " referenz referencia riferimento rif identifiant identifier identificador identificativo"
    " identyfikator kennung"
)
DATES = "date datum data fecha time"
QUANTITIES = (
    "quantity qty menge anzahl stueckzahl stuckzahl quantite qte cantidad cant quantidade qtd qtde"
    " quantita qta aantal ilosc"
)
PRICES = "price preis prix precio preco prezzo prijs cena"
OWN_PRICES = "unit item product lineitem einzel stuck stueck unitaire unitario stuk jednostkowa"
OTHER_PRICES = (
    "current final sale sales selling retail gross regular list base net original special variant"
    " compareat variantcompareat eur usd gbp verkaufs vk brutto netto end laden listen aktions"
    " sonder uvp ttc ht vente public unitairettc venta coniva unidad venda vendita listino ivato"
    " verkoop eenheids advies inclbtw brutta"
)
TITLES = (
    "name title titel bezeichnung nom titre libelle designation titulo nombre denominacion nome"
    " titolo denominazione naam nazwa tytul"
)
DESCRIPTIONS = (
    "description desc beschreibung descriptif descripcion descricao descrizione omschrijving"
    " beschrijving opis"
)
UNAVAILABLE = (
    "soldout outofstock unavailable discontinued deleted removed hidden archived blocked disabled"
    " inactive delisted retired ausverkauft vergriffen geloscht geloescht gesperrt ausgelistet"
    " epuise agotado descatalogado esaurito uitverkocht"
)
# Columns that say that a line is a return, and not that the purchase of the line was returned.
RETURN_LINES = (
    "isreturn isrefund isreturnline isrefundline iscreditnote iscreditmemo isreversal return refund"
    " returnflag refundflag isretoure istretoure isstorno iststorno istgutschrift estretour"
    " estavoir esdevolucion esabono ereso isretour"
)
CURRENCY_AT_END = r"(?i)[\W_]+(eur|euro|usd|gbp|chf|pln|sek|dkk|nok|czk)\W*$"  # Preis (EUR)
OF = ("", "d", "de", "du", "del", "dela", "della", "dell", "da", "do", "di", "van", "vande", "des",
      "der")  # fmt: skip
SURE_PARTS = 6  # characters of a name that may stand inside a longer one, like `fk_customer_id`
ENDINGS = ("id", "nr", "number", "nummer", "code", "stamp", "time", "type")


@dataclass(frozen=True)
class Names:
    """One group of names.

    Attributes:
        words: whole names, the surest first.
        pairs: words of which one of the first stands beside one of the second, in either order.
    """

    words: str
    pairs: tuple[tuple[str, str], ...] = ()

    @cached_property
    def _words(self) -> list[str]:
        return self.words.split()

    @cached_property
    def _pairs(self) -> list[tuple[frozenset[str], frozenset[str]]]:
        return [(frozenset(a.split()), frozenset(b.split())) for a, b in self.pairs]

    def place(self, key: str) -> int | None:
        """The place of a normalised name in the group; None if it is not in it.

        >>> Names("klant", (("klant", "nummer"),)).place("nummervandeklant")
        1
        """
        if key in self._words:
            return self._words.index(key)
        for cut in range(1, len(key)):
            left, right = key[:cut], key[cut:]
            for nouns, words in self._pairs:
                is_pair = left in nouns and right in words
                if is_pair or (left in words and any(right == of + n for of in OF for n in nouns
                                                     if right.endswith(n))):  # fmt: skip
                    return len(self._words)
        return None


Groups = tuple[Names, ...]
ITEM_IDS = (
    Names("biblionumber bibnumber bibid titleid"),  # a title of a library has several copies
    Names(
        f"{ITEMS} iid stockcode asin goods goodsid lineitemsku what",
        ((ITEMS, IDS),),
    ),
    Names(
        "isbn ean gtin upc barcode parentasin variantid offerid listingid content contentid"
        " businessid game gameid newsid hotelid courseid recipeid animeid venueid placeid"
        " restaurantid reference slug handle"
    ),
    Names(  # several in one cell
        "items products skus articles artikels produkte produits productos articulos prodotti"
        " articoli producten produtos artigos itemids productids"
    ),
)
EVENT_WORDS: dict[str, Groups] = {
    "user": (
        # Some shops give each order a customer id of its own beside the one of the person.
        Names("customeruniqueid uniquecustomerid"),
        Names("uid cardnumber loyaltyid who", ((USERS, IDS),)),
        Names(USERS),
        Names(
            "account accountid profileid username email emailaddress customeremail buyeremail"
            " useremail contactid emailbilling billingemail mail emailadresse kundenemail"
            " deviceid cookieid anonymousid userpseudoid fullvisitorid household householdid"
        ),
    ),
    "session": (
        Names(
            "session visit sitzung besuch sesion sessione sessie usersession usersessionid",
            (("session visit sitzung sitzungs besuch sesion sessione sessie", IDS),),
        ),
        Names(f"{ORDERS} sid incrementid", ((ORDERS, IDS),)),
        Names("name"),  # of an order, such as #1001, in exports of Shopify
    ),
    "item": ITEM_IDS,
    "timestamp": (
        Names(
            "timestamp ts time datetime eventtime eventtimestamp unixtime unixreviewtime epoch when"
            " zeitpunkt zeit zeitstempel datumzeit datumuhrzeit horodatage dateheure fechahora"
            " marcatemporal dataora datahora tijdstip tijdstempel tijd occurredat"
        ),
        Names(
            f"{DATES} day created createdat createdon purchasedat orderedat boughtat ratedat"
            " clickedat viewedat bestelltam dateadd loanedat dateissued",
            ((f"{ORDERS} {OCCASIONS}", DATES),),
        ),
        Names("updatedat modifiedat lastmodified uhrzeit heure hora ora"),
    ),
    "behaviour": (
        Names(
            f"{EVENTS} feedbacktype",
            ((EVENTS, "type typ typus art name tipo"),),
        ),
        Names("activity activitytype vorgang verb type typ tipo kind"),
    ),
    "rating": (
        Names(
            "rating ratings stars star overall ratingvalue userrating reviewrating bewertung sterne"
            " etoiles estrellas stelle sterren valoracion valutazione beoordeling notation"
            " avaliacao ocena"
        ),
        Names("score rate note grade vote reviewscore calificacion puntuacion voto punteggio nota"),
        Names(
            "liked isliked like thumb thumbs thumbsup recommended isrecommended gefallt gefaellt"
            " aime gustado"
        ),
    ),
    "clock": (Names("uhrzeit time timeofday heure hora ora tijd zeit"),),
    "quantity": (
        Names(
            f"{QUANTITIES} units unidades uds unites pezzi pz stuks sztuki szt quantityrefund",
            ((f"{ITEMS} {LINES} order ordered purchased sold", QUANTITIES),),
        ),
    ),
    "taken_back": (
        Names(
            "returned returndate returnedat refunded refunddate refundedat cancelled canceled"
            " cancelledat canceledat cancelleddate storniert storno stornodatum retourniert retoure"
            " zuruckgegeben isreturned isrefunded iscancelled iscanceled isvoid isvoided voided"
            f" {RETURN_LINES}"
        ),
    ),
    "order_status": (
        Names(
            "financialstatus paymentstatus orderstate paymentstate zahlungsstatus statutpaiement"
            " statutdupaiement estadodelpago estadopago statopagamento statodelpagamento"
            " betaalstatus",
            ((ORDERS, "status statut estado stato"),),
        ),
        Names("status fulfillmentstatus statut estado stato state currentstate"),
    ),
}
EVENT_FIELDS: dict[str, Groups] = {
    "title": (
        Names(
            "bezeichnung libelle designation",
            ((f"{ITEMS} {LINES}", TITLES), (ITEMS, DESCRIPTIONS)),
        ),
        Names(f"{DESCRIPTIONS} title titel titre titulo titolo tytul"),
        Names(TITLES),  # such names alone may be those of customers
    ),
    "price": (
        Names(f"lineitemprice itemprice itemcost {PRICES}", ((OWN_PRICES, PRICES),)),
        Names(
            "vk vkbrutto vknetto uvp msrp rrp pvp unitpricetaxincl unitpricetaxexcl",
            ((OTHER_PRICES, PRICES),),
        ),
    ),
    "category": (
        Names(
            "category categories categorypath maincategory kategorie kategorien warengruppe"
            " categoryname productcategoryname categorie categoria categorias kategoria department"
            " genre genres",
            (("item product", "category"),),
        ),
    ),
    "brand": (
        Names(
            "brand vendor manufacturer maker marke hersteller marque fabricant marca fabricante"
            " produttore merk merknaam brandname itembrand productbrand marka producent"
        ),
    ),
}
"""Fields of items in the events, by role."""
ITEM_WORDS: dict[str, Groups] = {
    "id": (*ITEM_IDS, Names("id code nummer numero key")),
    "title": (
        Names(TITLES, ((ITEMS, TITLES),)),
        Names("label caption header"),
    ),
    "text": (
        Names(
            f"text texto texte testo longdescription langtext {DESCRIPTIONS}",
            ((ITEMS, DESCRIPTIONS),),
        ),
        Names("body details summary abstract about overview plot shortdescription kurztext"),
    ),
    "price": (
        Names(
            PRICES,
            (
                (
                    "unit list sale retail product verkaufs brutto stueck stuck unitaire unitario",
                    PRICES,
                ),
            ),
        ),
        Names(
            "cost vk vkbrutto vknetto uvp msrp rrp pvp", ((f"{OWN_PRICES} {OTHER_PRICES}", PRICES),)
        ),
    ),
    "category": (
        Names(
            "category categories categorypath maincategory productcategory kategorie kategorien"
            " kategoriepfad warengruppe categorie categorieen chemincategorie categoria categorias"
            " genre genres department breadcrumb breadcrumbs kategoria"
        ),
        Names("producttype taxonomy googleproductcategory rayon rubrik departement subcategory"),
    ),
    "available": (
        Names(
            "available isavailable availability instock isinstock lagernd lieferbar auflager"
            " verfugbar verfuegbar verfugbarkeit verfuegbarkeit disponible disponibilite enstock"
            " disponibilidad enexistencia disponibile disponibilita beschikbaar beschikbaarheid"
            " opvoorraad leverbaar dostepny"
        ),
        Names(
            "stock stockstatus stocklevel stockquantity inventory inventoryquantity lagerbestand"
            " bestand giacenza voorraad existencias active isactive aktiv actif activo attivo"
            " actief enabled published ispublished visible salable purchasable forsale"
        ),
        Names("quantity qty status"),
    ),
    "unavailable": (
        Names(UNAVAILABLE),
        Names(" ".join(f"is{word}" for word in UNAVAILABLE.split())),
    ),
    "available_from": (
        Names(
            "availablefrom publishedat publishedfrom publishdate validfrom onsalefrom salestart"
            " verfugbarab verfuegbarab gultigab gueltigab lieferbarab disponibledes"
            " disponibleapartirde disponibledesde disponibileda disponibiledal beschikbaarvanaf"
            " launchdate golive"
        ),
    ),
    "available_until": (
        Names(
            "availableuntil availableto validuntil validto expires expiresat expirydate"
            " expirationdate unpublishat unpublishdate saleend verfugbarbis verfuegbarbis gultigbis"
            " gueltigbis disponiblejusqua disponiblehasta disponibilefinoal beschikbaartot"
            " discontinuedat deletedat removedat archivedat delistedat"
        ),
    ),
}


@lru_cache(1 << 16)  # asked again for every role and every file
def rank(name: str, groups: Groups) -> int | None:
    """How surely a column of this name has a role: 0 is the surest; None if it does not fit."""
    found = _best(name, groups)
    return None if found is None else found[0]


def order(name: str, groups: Groups) -> tuple[int, int]:
    """Sorts columns with a role by how usual their names are."""
    return _best(name, groups) or (2 * len(groups), 0)


def _best(name: str, groups: Groups) -> tuple[int, int] | None:
    places = [_place(key, groups) for key in _keys(name)]
    return min((place for place in places if place is not None), default=None)


def _keys(name: str) -> list[str]:
    """The forms in which a name is looked up: a field of a record also by its own name.

    >>> _keys("order.customer.id"), _keys("lines.sku"), _keys("Kunden-Nr.")
    (['ordercustomerid', 'id', 'customerid', 'customer'], ['linessku', 'sku'], ['kundennr'])
    """
    parts = [key for key in map(normalised, name.split(".")) if key]
    keys = [normalised(name)]
    if len(parts) > 1:
        keys.append(parts[-1])
        if parts[-1] in IDS.split():
            keys += ["".join(parts[-2:]), parts[-2]]
    return keys


def _place(key: str, groups: Groups) -> tuple[int, int] | None:
    """The group of a name and its place there; later groups for a name inside a longer one."""
    for number, group in enumerate(groups):
        if (place := group.place(key)) is not None:
            return number, place
    parts = [part for cut in range(SURE_PARTS, len(key)) for part in (key[:cut], key[-cut:])]
    parts = [part for part in parts if part.endswith(ENDINGS)]
    for number, group in enumerate(groups):
        if any(group.place(part) is not None for part in parts):
            return len(groups) + number, 0
    return None
