"""Usual names of columns in English, German, French, Spanish, Italian and Dutch.

Names are compared without case, accents, blanks and signs (`normalised`). A role has up to three
groups of names, the surest first.
"""

from __future__ import annotations

from functools import lru_cache

from recsys.event_names import normalised

MORE_PRICES = (
    "currentprice finalprice saleprice salesprice sellingprice retailprice grossprice pricegross"
    " regularprice listprice baseprice netprice pricenet originalprice specialprice variantprice"
    " compareatprice variantcompareatprice msrp rrp priceeur priceusd pricegbp preiseur"
    " einzelpreis verkaufspreis vkpreis vk vkbrutto vknetto bruttopreis preisbrutto endpreis"
    " ladenpreis listenpreis nettopreis preisnetto uvp uvppreis aktionspreis sonderpreis"
    " prixttc prixdevente prixvente prixpublic prixunitairettc prixht"
    " pvp precioventa preciodeventa precioconiva preciofinal preciounidad"
    " prezzovendita prezzodivendita prezzolistino prezzodilistino prezzounitario prezzoivato"
    " verkoopprijs stukprijs eenheidsprijs adviesprijs prijsinclbtw"
)
CURRENCY_AT_END = r"(?i)[\W_]+(eur|euro|usd|gbp|chf|pln|sek|dkk|nok|czk)\W*$"  # Preis (EUR)
UNAVAILABLE = (
    "soldout outofstock unavailable discontinued deleted removed hidden archived blocked disabled"
    " inactive delisted retired ausverkauft vergriffen geloscht geloescht gesperrt ausgelistet"
    " epuise agotado descatalogado esaurito uitverkocht"
)

EVENT_WORDS: dict[str, tuple[str, ...]] = {
    "user": (
        # Some shops give each order a customer id of its own beside the one of the person.
        "customeruniqueid uniquecustomerid",
        "user userid uid customer customerid custid customerno customernumber client clientid kunde"
        " kundeid kundenid kundennummer kundennr kdnr visitor visitorid buyer buyerid shopper"
        " shopperid member memberid membernumber memberno cardnumber loyaltyid"
        " reviewer reviewerid utilisateur utilisateurid idutilisateur"
        " idclient numeroclient numclient acheteur cliente clienteid idcliente usuario usuarioid"
        " idusuario comprador utente utenteid idutente acquirente klant klantid klantnummer"
        " gebruiker gebruikerid benutzer benutzerid nutzer nutzerid person personid besucher"
        " besucherid visiteur visiteurid subscriberid viewerid listenerid idvisitor"
        " who",
        "account accountid profileid username email emailaddress customeremail useremail contactid"
        " emailbilling billingemail mail emailadresse kundenemail"
        " deviceid cookieid anonymousid userpseudoid fullvisitorid household householdid",
    ),
    "session": (
        "session sessionid usersession usersessionid sitzung sitzungid sitzungsid visit visitid"
        " besuch besuchid sesion sesionid idsesion sessione idsessione sessie sessieid idsession",
        "sid order orderid orderno ordernumber invoice invoiceno invoiceid basketid cartid"
        " bestellnummer bestellid transactionid pedido pedidoid idpedido numeropedido nopedido"
        " factura numerofactura commande numerocommande ordine numeroordine ordernummer"
        " transaction transactionno transactionnumber ordernr orderreference receipt receiptid"
        " receiptno receiptnumber ticketid ticketno auftrag auftragsnr auftragsnummer auftragsid"
        " bestellnr rechnungsnr rechnungsnummer belegnr belegnummer bonnr",
        "name",  # of an order, such as #1001, in exports of Shopify
    ),
    "item": (
        "item itemid iid itemno itemnumber itemcode product productid prodid productcode productno"
        " productnr sku skuid article articleid articleno articlenumber artikel artikelid"
        " artikelnummer artikelnr artnr artikelcode asin movie movieid book bookid track trackid"
        " song songid artist artistid video videoid produit produitid idproduit refproduit"
        " producto productoid idproducto codigoproducto codigoarticulo refarticulo codarticulo"
        " prodotto prodottoid idprodotto"
        " codiceprodotto articulo articuloid idarticulo articolo idarticolo produkt produktid"
        " produktnummer productnummer referenceproduit stockcode goods goodsid"
        " lineitemsku what",
        "isbn ean gtin upc parentasin variantid offerid listingid contentid content businessid"
        " game gameid newsid hotelid courseid recipeid animeid venueid placeid restaurantid"
        " reference",
        "items products skus articles produkte produits productos articulos prodotti articoli"
        " producten itemids productids",  # several in one cell
    ),
    "timestamp": (
        "timestamp ts time datetime eventtime eventtimestamp unixtime unixreviewtime epoch when"
        " zeitpunkt zeit zeitstempel datumzeit datumuhrzeit horodatage dateheure fechahora"
        " marcatemporal dataora tijdstip tijdstempel tijd occurredat",
        "date datum data fecha eventdate day created createdat createdon purchasedat purchasedate"
        " purchasetime orderdate ordertime orderedat invoicedate transactiondate transactiontime"
        " boughtat reviewtime reviewdate ratedat clickedat viewedat bestelldatum bestelltam"
        " kaufdatum datecommande dateachat fechacompra fechapedido dataacquisto dataordine"
        " besteldatum aankoopdatum",
        "updatedat modifiedat lastmodified uhrzeit heure hora",
    ),
    "behaviour": (
        "event eventtype eventname behavior behaviour behaviortype behaviourtype action actiontype"
        " interaction interactiontype aktion aktionsart aktionstyp ereignis ereignistyp ereignisart"
        " evenement typeevenement typedevenement evento tipoevento tipodeevento accion tipoaccion"
        " azione tipoazione tipodiazione gebeurtenis gebeurtenistype actie actietype feedbacktype",
        "activity activitytype vorgang verb type typ tipo kind",
    ),
    "rating": (
        "rating ratings stars star overall ratingvalue userrating reviewrating bewertung sterne"
        " etoiles estrellas stelle sterren valoracion valutazione beoordeling notation",
        "score rate note grade vote reviewscore calificacion puntuacion voto punteggio",
        "liked isliked like thumb thumbs thumbsup recommended isrecommended gefallt gefaellt aime"
        " gustado",
    ),
    "clock": ("uhrzeit time timeofday heure hora ora tijd zeit",),
    "quantity": (
        "quantity qty menge anzahl stueckzahl quantite cantidad quantita aantal units unidades uds"
        " unites pezzi stuks quantityrefund",
    ),
    "taken_back": (
        "returned returndate returnedat refunded refunddate refundedat cancelled canceled"
        " cancelledat canceledat cancelleddate storniert storno stornodatum retourniert retoure"
        " zuruckgegeben isreturned isrefunded iscancelled iscanceled isvoid isvoided voided"
        " isreturn isrefund isreturnline isrefundline iscreditnote iscreditmemo isreversal return"
        " refund returnflag refundflag isretoure istretoure isstorno iststorno istgutschrift"
        " estretour estavoir esdevolucion esabono ereso isretour",
    ),
    "order_status": (
        "financialstatus paymentstatus orderstatus bestellstatus zahlungsstatus statutcommande"
        " estadopedido statoordine bestelstatus orderstate paymentstate statutpaiement"
        " statutdupaiement statutdelacommande estadodelpago estadopago estadodelpedido"
        " statopagamento statodelpagamento statodellordine statusderbestellung betaalstatus",
        "status fulfillmentstatus statut estado stato state",
    ),
}
EVENT_FIELDS: dict[str, tuple[str, ...]] = {
    "title": (
        "lineitemname lineitemtitle lineitemsname lineitemstitle itemsname itemstitle linesname"
        " linestitle productsname productstitle itemname itemtitle productname producttitle"
        " productdescription itemdescription articlename artikelname artikelbezeichnung bezeichnung"
        " produktname produktbezeichnung nomproduit nomarticle libelle designation nombreproducto"
        " nombrearticulo nomeprodotto nomearticolo productnaam artikelnaam movietitle booktitle",
        "description desc beschreibung artikelbeschreibung produktbeschreibung descripcion"
        " descrizione omschrijving title titel titre titulo titolo",
    ),
    "price": (
        "lineitemprice itemprice itemcost price unitprice productprice preis einzelpreis"
        " stueckpreis prix prixunitaire precio preciounitario prezzo prezzounitario prijs",
        MORE_PRICES,
    ),
    "category": (
        "category categories categorypath maincategory productcategory itemcategory kategorie"
        " categoryname productcategoryname"
        " kategorien warengruppe categorie categoria categorias department genre genres",
    ),
    "brand": (
        "brand vendor manufacturer maker marke hersteller marque fabricant marca fabricante"
        " produttore merk merknaam brandname itembrand productbrand",
    ),
}
"""Fields of items in the events, by role."""
ITEM_WORDS: dict[str, tuple[str, ...]] = {
    "id": (*EVENT_WORDS["item"], "id code nummer numero key"),
    "title": (
        "title name itemname itemtitle productname producttitle articlename movietitle booktitle"
        " titel bezeichnung artikelname artikelbezeichnung produktname produktbezeichnung titre nom"
        " nomproduit libelle designation titulo nombre nombreproducto denominacion titolo nome"
        " nomeprodotto denominazione naam productnaam artikelnaam",
        "label caption header",
    ),
    "text": (
        "text texto texte testo description desc longdescription productdescription"
        " itemdescription beschreibung artikelbeschreibung produktbeschreibung langtext descriptif"
        " descripcion descrizione omschrijving productomschrijving beschrijving",
        "body details summary abstract about overview plot shortdescription kurztext",
    ),
    "price": (
        "price unitprice listprice saleprice retailprice productprice preis verkaufspreis"
        " bruttopreis stueckpreis prix prixunitaire precio preciounitario prezzo prijs",
        f"{MORE_PRICES} cost",
    ),
    "category": (
        "category categories categorypath maincategory productcategory kategorie kategorien"
        " kategoriepfad warengruppe categorie categorieen chemincategorie categoria categorias"
        " genre genres department breadcrumb breadcrumbs",
        "producttype taxonomy googleproductcategory rayon rubrik departement subcategory",
    ),
    "available": (
        "available isavailable availability instock isinstock lagernd lieferbar auflager verfugbar"
        " verfuegbar verfugbarkeit verfuegbarkeit disponible disponibilite enstock disponibilidad"
        " enexistencia disponibile disponibilita beschikbaar beschikbaarheid opvoorraad leverbaar",
        "stock stockstatus stocklevel stockquantity inventory inventoryquantity lagerbestand"
        " bestand giacenza voorraad existencias active isactive aktiv actif activo attivo actief"
        " enabled published ispublished visible salable purchasable forsale",
        "quantity qty status",
    ),
    "unavailable": (UNAVAILABLE, " ".join(f"is{word}" for word in UNAVAILABLE.split())),
    "available_from": (
        "availablefrom publishedat publishedfrom publishdate validfrom onsalefrom salestart"
        " verfugbarab verfuegbarab gultigab gueltigab lieferbarab disponibledes disponibleapartirde"
        " disponibledesde disponibileda disponibiledal beschikbaarvanaf launchdate golive",
    ),
    "available_until": (
        "availableuntil availableto validuntil validto expires expiresat expirydate expirationdate"
        " unpublishat unpublishdate saleend verfugbarbis verfuegbarbis gultigbis gueltigbis"
        " disponiblejusqua disponiblehasta disponibilefinoal beschikbaartot discontinuedat"
        " deletedat removedat archivedat delistedat",
    ),
}
SURE_PARTS = 6  # characters of a name that may stand inside a longer one, like `fk_customer_id`
NUMBERS_OF = {"id", "code", "codigo", "number", "numero", "nr", "nummer", "key", "ref"}
ENDINGS = ("id", "nr", "number", "nummer", "code", "stamp", "time", "type")


@lru_cache(1 << 16)  # asked again for every role and every file
def rank(name: str, groups: tuple[str, ...]) -> int | None:
    """How surely a column of this name has a role: 0 is the surest; None if it does not fit."""
    found = [_rank(key, groups) for key in _keys(name)]
    return min((place for place in found if place is not None), default=None)


def _keys(name: str) -> list[str]:
    """The forms in which a name is looked up: a field of a record also by its own name.

    >>> _keys("order.customer.id"), _keys("lines.sku"), _keys("Kunden-Nr.")
    (['ordercustomerid', 'id', 'customerid', 'customer'], ['linessku', 'sku'], ['kundennr'])
    """
    parts = [key for key in map(normalised, name.split(".")) if key]
    keys = [normalised(name)]
    if len(parts) > 1:
        keys.append(parts[-1])
        if parts[-1] in NUMBERS_OF:
            keys += ["".join(parts[-2:]), parts[-2]]
    return keys


def _rank(key: str, groups: tuple[str, ...]) -> int | None:
    words = [group.split() for group in groups]
    for place, group in enumerate(words):
        if key in group:
            return place
    for place, group in enumerate(words):
        for word in group:
            sure = len(word) >= SURE_PARTS and word.endswith(ENDINGS)
            if sure and (key.endswith(word) or key.startswith(word)):
                return len(words) + place
    return None
